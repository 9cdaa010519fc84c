"""Choosing tokens in plain torch: counter-based noise and exact truncation.

Every result is a function of one row alone, with the same bits for any batch around it and
in any implementation: the noise is integer arithmetic on (seed, position, token id), and
probability mass is added up as integers, so no order of additions can move a boundary.
Everything has static shapes and reads nothing back to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphs.kernels.sample.rows import RowParams, SlotAdjustments

NoiseFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
# Up to this top_k only the best tokens are ranked, not the vocabulary.
SMALL_TOP_K = 64
_MASK32 = 0xFFFFFFFF
_HALF32 = 1 << 31
_MULTIPLIER_A = 0xD2511F53
_MULTIPLIER_B = 0xCD9E8D57
_KEY_STEP_A = 0x9E3779B9
_KEY_STEP_B = 0xBB67AE85
_NUM_ROUNDS = 10
# Largest float32 below 1: words near 2^32 would round up to 1.
_MAX_UNIFORM = 1.0 - 2.0**-24
# Mass unit of 2^-40 of the likeliest token: 2^18 tokens sum to less than 2^59.
_MASS_SCALE = 2.0**40


def _multiply_wide(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of word * multiplier, for an odd multiplier and 32-bit words.

    The plain product can pass 2^63, and compiled C++ drops the mask after a signed product
    that "cannot" overflow. With the word centred on zero nothing overflows:
    word * m = (word - 2^31) * m + (m - 1) / 2 * 2^32 + 2^31.
    """
    centred = (word - _HALF32) * multiplier + _HALF32
    return (centred >> 32) + (multiplier >> 1), centred & _MASK32


def philox_words(
    seeds: Tensor, positions: Tensor, groups: Tensor, stream: int = 0
) -> tuple[Tensor, ...]:
    """The four output words of Philox4x32-10 as int64, each [R, N], in [0, 2^32).

    seeds, positions: [R] int64. groups: [R, N] or [1, N] int64, in [0, 2^32), in a compiled
    function an input or a result, not its own `arange`: the compiler would do the arithmetic
    on the 32-bit index behind it. The key is (seed low, seed high), the counter (group,
    position, stream, 0). These are the bits of `tl.philox(seed, group, position, stream, 0)`
    with 32-bit counters (64-bit ones select another generator there). `stream`: in [0, 2^32);
    numbers of different streams are independent, 0 is that of drawing tokens. Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    key_a = seeds[:, None] & _MASK32
    key_b = (seeds[:, None] >> 32) & _MASK32
    word_0, word_1 = groups, positions[:, None] & _MASK32
    word_2, word_3 = torch.full_like(word_1, stream), torch.zeros_like(word_1)
    for _ in range(_NUM_ROUNDS):
        high_a, low_a = _multiply_wide(word_0, _MULTIPLIER_A)
        high_b, low_b = _multiply_wide(word_2, _MULTIPLIER_B)
        word_0, word_1 = high_b ^ word_1 ^ key_a, low_b
        word_2, word_3 = high_a ^ word_3 ^ key_b, low_a
        key_a = (key_a + _KEY_STEP_A) & _MASK32
        key_b = (key_b + _KEY_STEP_B) & _MASK32
    return word_0, word_1, word_2, word_3


def token_words(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The words of any tokens, [R, N] int64: word t % 4 of group t // 4; see `philox_words`."""
    words = philox_words(seeds, positions, token_ids >> 2)
    is_odd = (token_ids & 1) == 1
    low = torch.where(is_odd, words[1], words[0])
    high = torch.where(is_odd, words[3], words[2])
    return torch.where((token_ids & 2) == 2, high, low)


def uniform_from_words(words: Tensor) -> Tensor:
    """32-bit words as float32 in (0, 1), ends excluded."""
    return ((words.float() + 0.5) * 2.0**-32).clamp(max=_MAX_UNIFORM)


def gumbel_from_uniform(uniform: Tensor) -> Tensor:
    """Standard Gumbel noise, always finite.

    argmax(log p + noise) draws from p. The large values, which decide, come from u near 0,
    where float32 is finest.
    """
    return -torch.log(-torch.log1p(-uniform))


def gumbel_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of any tokens, [R, N] float32; arguments as in `token_words`."""
    return gumbel_from_uniform(uniform_from_words(token_words(seeds, positions, token_ids)))


def vocabulary_uniform(
    seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int = 0
) -> Tensor:
    """Uniform values in (0, 1) of every token, [R, V] float32.

    token_ids: [1, V], all ids in order: its first numbers are those of the groups, and come from
    memory, as `philox_words` asks. Four tokens share a call of the generator. `stream`: as there.
    """
    vocab_size = token_ids.shape[1]
    groups = token_ids[:, : (vocab_size + 3) // 4]
    # Stacked as float32: half the bytes of words, and what is left to do is contiguous.
    uniform = [uniform_from_words(word) for word in philox_words(seeds, positions, groups, stream)]
    return torch.stack(uniform, -1).flatten(1)[:, :vocab_size]


def vocabulary_noise(
    seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int = 0
) -> Tensor:
    """`gumbel_noise` of every token, [R, V] float32; arguments as in `vocabulary_uniform`."""
    return gumbel_from_uniform(vocabulary_uniform(seeds, positions, token_ids, stream))


def rank_tokens(scores: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """The `num_ranked` best tokens of each row, best first: ids int64 and scores, [R, num_ranked].

    scores: [R, V] float32, -inf allowed. Equal scores rank by token id, lowest first.
    """
    vocab_size = scores.shape[-1]
    # -0.0 ranks as 0.0, its equal.
    bits = torch.where(scores == 0.0, 0, scores.view(torch.int32))
    # Counted down from the last id: a compiler may do index arithmetic in 32 bits.
    reversed_ids = vocab_size - 1 - torch.arange(vocab_size, device=scores.device)
    keys = (_flip_negative(bits).long() << 32) | reversed_ids
    if num_ranked < vocab_size:
        ranked = torch.topk(keys, num_ranked, dim=-1).values
    else:
        ranked = torch.sort(keys, dim=-1, descending=True).values
    ranked_bits = _flip_negative((ranked >> 32).int())
    return vocab_size - 1 - (ranked & _MASK32), ranked_bits.view(torch.float32)


def _flip_negative(bits: Tensor) -> Tensor:
    """Float bits to integers of the same order, and back: negative ones flip their magnitude."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def keep_mask(ranked: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which ranked tokens stay: top-k, then top-p of what is left, then min-p; [R, N] bool.

    ranked: [R, N] float32, scaled logits less their row maximum, best first; N covers at
    least top_k tokens in rows that use top_k or top_p. top_k: [R] int64 >= 1, N or more is
    off. top_p: [R] float32 in (0, 1], 1 is off: the fewest tokens whose share of the mass
    reaches top_p. min_p: [R] float32 in [0, 1]: at least that fraction of the best token's
    probability. The best token always stays.
    """
    num_ranked = ranked.shape[-1]
    mass = (torch.exp(ranked) * _MASS_SCALE).long()
    # The scan reads nothing but scores: compilers fail to fuse it with per-row lookups.
    mass_through = mass.cumsum(-1)
    total = mass_through.gather(1, top_k.clamp(max=num_ranked)[:, None] - 1)
    # At least 1, for the best token stays even where top_p rounds to 0.
    wanted = torch.ceil(top_p[:, None].double() * total.double()).long().clamp(min=1)
    is_nucleus = (mass_through - mass < wanted) | (top_p[:, None] >= 1.0)
    ranks = torch.arange(num_ranked, device=ranked.device)
    is_likely = ranked >= torch.log(min_p)[:, None]
    return (ranks < top_k[:, None]) & is_nucleus & is_likely


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token of each row, [R] int64, of equal ones the lowest id; and which are bad, [R].

    logits: [R, V], any float dtype. A row with NaN or +inf, or with nothing else than -inf, is bad,
    its token 0.
    """
    raw = logits.float()
    token_ids = raw.argmax(-1)
    is_bad = ~torch.isfinite(raw.amax(-1))
    return torch.where(is_bad, 0, token_ids), is_bad


def adjust_logits(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: RowParams,
    tables: SlotAdjustments,
    *,
    has_penalties: bool,
    has_bias: bool,
    has_min_tokens: bool,
    row_tokens: Tensor | None = None,
    rows_per_request: int = 1,
) -> tuple[Tensor, Tensor]:
    """Scores to draw by, [R, V] float32, at most 0: logits less their row maximum over temperature.

    Before that come penalties, then logit bias, then the min_tokens mask, of those that `has_*`
    names; neutral rows keep their bits. logits: [R, V], any float dtype. slots, positions: [R]
    int64. The second result, [R] bool, says which rows are bad, as `argmax` does; their scores
    mean nothing. row_tokens: [R] int64, the token each row was computed from, negative for none;
    needed if `rows_per_request` is more than 1. Penalties then count the tokens of a request's
    rows up to this one, less its first, which the tables count.
    """
    adjusted = logits.float()
    if has_penalties:
        counts = tables.output_counts[slots]
        if rows_per_request > 1:
            assert row_tokens is not None
            counts = _count_drafts(counts, row_tokens, rows_per_request)
        is_seen = tables.in_prompt[slots] | (counts > 0)
        repetition = rows.repetition_penalty[:, None]
        repeated = torch.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
        adjusted = torch.where(is_seen, repeated, adjusted)
        adjusted = adjusted - rows.frequency_penalty[:, None] * counts
        adjusted = adjusted - rows.presence_penalty[:, None] * (counts > 0)
    if has_bias:
        adjusted = adjusted.scatter_add(1, tables.bias_ids[slots], tables.bias_values[slots])
    if has_min_tokens:
        masked_ids = tables.masked_ids[slots]
        is_masked = (masked_ids >= 0) & (positions < rows.min_tokens)[:, None]
        offsets = torch.where(is_masked, -torch.inf, 0.0)
        adjusted = adjusted.scatter_add(1, masked_ids.clamp(min=0), offsets)
    peaks = adjusted.amax(-1, keepdim=True)
    # No adjustment turns NaN or +inf into a number, and amax hands NaN on.
    is_bad = ~torch.isfinite(peaks[:, 0])
    return (adjusted - peaks).div_(rows.temperature[:, None]), is_bad


def _count_drafts(counts: Tensor, row_tokens: Tensor, rows_per_request: int) -> Tensor:
    """Counts [R, V] int32, and for each row the drafts of its request up to it."""
    drafts = row_tokens.view(-1, rows_per_request)[:, 1:]
    tokens = drafts.repeat_interleave(rows_per_request, 0)
    order = torch.arange(rows_per_request, device=counts.device)
    is_up_to = (order[None, 1:] <= order[:, None]).repeat(len(drafts), 1)
    is_counted = is_up_to & (tokens >= 0)
    return counts.scatter_add(1, tokens.clamp(min=0), is_counted.int())


def draw_tokens(
    scaled: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    rows: RowParams,
    *,
    has_truncation: bool,
    is_top_k_small: bool,
    make_noise: NoiseFunction = vocabulary_noise,
) -> Tensor:
    """Gumbel-max over the tokens that stay, [R] int64; equal noisy scores: the lowest id.

    scaled: [R, V] float32, see `adjust_logits`, -inf for what may never be drawn. token_ids: [1, V]
    int64, every token in order. positions: [R] int64, which noise of the row's seed; greedy rows
    get none. has_truncation: some row uses top_k, top_p or min_p. is_top_k_small: every row that
    is not greedy has a top_k in [1, SMALL_TOP_K]. make_noise: `vocabulary_noise`, perhaps
    compiled: it is most of the work of a row that is not truncated.
    """
    vocab_size = scaled.shape[-1]
    if has_truncation and is_top_k_small:
        token_ids, ranked = rank_tokens(scaled, min(SMALL_TOP_K, vocab_size))
        noise = gumbel_noise(rows.seed, positions, token_ids)
    elif has_truncation:
        noise = make_noise(rows.seed, positions, token_ids)
        token_ids, ranked = rank_tokens(scaled, vocab_size)
        noise = noise.gather(1, token_ids)
    else:
        noise = make_noise(rows.seed, positions, token_ids)
        ranked = scaled
    noisy = ranked + torch.where(rows.is_greedy[:, None], 0.0, noise)
    if has_truncation:
        is_kept = keep_mask(ranked, rows.top_k, rows.top_p, rows.min_p)
        noisy = torch.where(is_kept, noisy, -torch.inf)
    is_best = noisy == noisy.amax(-1, keepdim=True)
    return torch.where(is_best, token_ids, vocab_size).amin(-1)
