"""One row at a time in plain Python: what a sampler must choose, and how often.

Everything is float64 on lists and follows the definitions, sorted and summed the plain way.
Where a float32 sampler may differ because a token sits on a boundary, the token is doubtful.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """The parameters of one request, by their public names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    eos_ids: Sequence[int] = ()


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """The published generator in unbounded integers (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def noise_word(seed: int, position: int, token_id: int) -> int:
    """The word that decides one token's noise."""
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    return philox4x32_10((token_id // 4, position, 0, 0), key)[token_id % 4]


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def gumbel(seed: int, position: int, token_id: int) -> float:
    """Gumbel noise of the word, the uniform rounded to float32, the logarithms exact."""
    word = noise_word(seed, position, token_id)
    uniform = min(_float32(_float32(word) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


def adjust(logits: Sequence[float], row: Row, prompt: list[int], output: list[int]) -> list[float]:
    """Penalties, logit bias and the min_tokens mask, for the token after `output`."""
    adjusted = list(logits)
    for token_id in set(prompt) | set(output):
        value = adjusted[token_id]
        penalty = row.repetition_penalty
        adjusted[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(output):
        adjusted[token_id] -= row.frequency_penalty * output.count(token_id)
        adjusted[token_id] -= row.presence_penalty
    for token_id, bias in row.logit_bias.items():
        adjusted[token_id] += bias
    if len(output) < row.min_tokens:
        for token_id in (*row.stop_token_ids, *row.eos_ids):
            adjusted[token_id] = -math.inf
    return adjusted


def scale(logits: Sequence[float], temperature: float) -> list[float]:
    """Logits less their maximum over the temperature."""
    peak = max(logits)
    return [(value - peak) / temperature for value in logits]


@dataclass(frozen=True)
class Filtered:
    """Tokens that stay, best first, and tokens so near a boundary that rounding decides."""

    kept: list[int]
    doubtful: set[int]


def truncate(scaled: Sequence[float], row: Row, slack: float = 1e-5) -> Filtered:
    """top-k, then top-p of the renormalised rest, then min-p; ties rank by token id."""
    kept = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    doubtful: set[int] = set()
    if row.top_k > 0:
        kept = kept[: row.top_k]
    if row.top_p < 1.0:
        total = math.fsum(math.exp(scaled[token_id]) for token_id in kept)
        before, nucleus = 0.0, []
        for token_id in kept:
            if token_id != kept[0] and abs(before - row.top_p) < slack:
                doubtful.add(token_id)
            if token_id == kept[0] or before < row.top_p:
                nucleus.append(token_id)
            before += math.exp(scaled[token_id]) / total
        kept = nucleus
    if row.min_p > 0.0:
        floor = math.log(row.min_p)
        doubtful |= {t for t in kept if abs(scaled[t] - floor) < slack and scaled[t] < 0.0}
        kept = [token_id for token_id in kept if scaled[token_id] >= floor]
    return Filtered(kept, doubtful)


def probabilities(
    logits: Sequence[float], row: Row, prompt: list[int], output: list[int]
) -> list[float]:
    """The distribution that the next token must have, 0 for tokens that fall away."""
    scaled = scale(adjust(logits, row, prompt, output), row.temperature)
    filtered = truncate(scaled, row)
    assert not filtered.doubtful, "choose a case that no rounding can tip"
    total = math.fsum(math.exp(scaled[token_id]) for token_id in filtered.kept)
    shares = [0.0] * len(scaled)
    for token_id in filtered.kept:
        shares[token_id] = math.exp(scaled[token_id]) / total
    return shares


def choose(
    logits: Sequence[float], row: Row, prompt: list[int], output: list[int], slack: float = 1e-4
) -> set[int]:
    """The tokens a sampler may return: one, or several where rounding decides."""
    adjusted = adjust(logits, row, prompt, output)
    if row.temperature == 0.0:
        best = max(adjusted)
        near = [t for t, value in enumerate(adjusted) if value > best - slack]
        ties = [t for t in near if adjusted[t] == best]
        return set(near) if len(near) > len(ties) else {ties[0]}
    scaled = scale(adjusted, row.temperature)
    filtered = truncate(scaled, row)
    position = len(output)
    noisy = {
        token_id: scaled[token_id] + gumbel(row.seed, position, token_id)
        for token_id in set(filtered.kept) | filtered.doubtful
    }
    sure = [noisy[token_id] for token_id in filtered.kept if token_id not in filtered.doubtful]
    floor = max(sure, default=-math.inf) - slack
    return {token_id for token_id, value in noisy.items() if value >= floor}


def chi_square_p(counts: Sequence[int], shares: Sequence[float]) -> float:
    """P-value of `counts` under `shares`; a count where the share is 0 gives 0.

    Cells that expect fewer than 5 are pooled, smallest first.
    """
    total = sum(counts)
    if any(count and share == 0.0 for count, share in zip(counts, shares, strict=True)):
        return 0.0
    cells: list[tuple[float, int]] = []
    pooled_share, pooled_count = 0.0, 0
    for share, count in sorted(zip(shares, counts, strict=True)):
        pooled_share, pooled_count = pooled_share + share, pooled_count + count
        if pooled_share * total >= 5.0:
            cells.append((pooled_share, pooled_count))
            pooled_share, pooled_count = 0.0, 0
    if pooled_count or pooled_share:
        share, count = cells.pop()
        cells.append((share + pooled_share, count + pooled_count))
    statistic = math.fsum((n - s * total) ** 2 / (s * total) for s, n in cells)
    freedom = len(cells) - 1
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
