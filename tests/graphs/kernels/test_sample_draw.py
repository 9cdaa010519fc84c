"""Drawing tokens from truncated distributions, against the reference that ranks them all.

The kernel's exp may be an ulp from torch's, which moves the end of a nucleus. Scores here are
values on which both agree, found by running both: results must then be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphs.kernels.sample import reference
from graphs.kernels.sample.ops import draw_tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [1, 63, 65, pytest.param(500, marks=pytest.mark.sanitize), 3000]
QWEN_VOCAB_SIZE = 248320
OFF = 2**30  # a top_k that no vocabulary reaches
INFINITY = float("inf")
# top_k, top_p, min_p
TRUNCATIONS = [
    (OFF, 1.0, 0.0),
    (1, 1.0, 0.0),
    (2, 0.5, 0.0),
    (50, 1.0, 0.0),
    (50, 0.95, 0.0),
    (1600, 0.3, 0.0),
    (OFF, 0.95, 0.0),
    (OFF, 0.5, 0.0),
    (OFF, 1e-30, 0.0),
    (OFF, 1.0, 0.2),
    (20, 0.9, 0.05),
    (OFF, 0.9, 1.0),
]
Truncation = tuple[int, float, float]


@triton.jit
def exp_probe(values_ptr, results_ptr, num_values, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    o_value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_value = o_value < num_values
    b_value = tl.load(values_ptr + o_value, mask=m_value)
    tl.store(results_ptr + o_value, tl.exp(b_value), mask=m_value)


def shared_scores(num_scores: int, spread: float, device: torch.device) -> Tensor:
    """About num_scores values of at most 0 whose exp is the same in Triton and in torch."""
    generator = torch.Generator().manual_seed(1)
    values = -(torch.randn(4 * num_scores, generator=generator).abs() * spread).to(device)
    results = torch.empty_like(values)
    exp_probe[(triton.cdiv(len(values), 1024),)](values, results, len(values), BLOCK=1024)
    return values[results == values.exp()][:num_scores]


def random_scores(
    num_rows: int, vocab_size: int, spread: float, num_values: int, device: torch.device
) -> Tensor:
    """Rows of few or many distinct values, the best 0."""
    generator = torch.Generator().manual_seed(vocab_size)
    values = shared_scores(num_values, spread, device)
    assert len(values) > num_values // 2
    chosen = torch.randint(len(values), (num_rows, vocab_size), generator=generator)
    scaled = values[chosen.to(device)]
    best = torch.randint(vocab_size, (num_rows, 1), generator=generator).to(device)
    return scaled.scatter(1, best, 0.0)


def random_noise(scaled: Tensor, seed: int = 0) -> Tensor:
    seeds = seed + torch.arange(len(scaled), device=scaled.device)
    token_ids = torch.arange(scaled.shape[1], device=scaled.device)[None]
    return reference.gumbel_noise(seeds, torch.zeros_like(seeds), token_ids)


def parameters(
    truncations: Sequence[Truncation], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    top_k, top_p, min_p = zip(*truncations, strict=True)
    limits = torch.tensor(top_k, device=device).clamp(max=vocab_size)
    return limits, torch.tensor(top_p, device=device), torch.tensor(min_p, device=device)


def check_draws(
    scaled: Tensor,
    truncations: Sequence[Truncation],
    noise: Tensor | None = None,
    is_greedy: Tensor | None = None,
) -> Tensor:
    """The op's tokens, which must be the reference's."""
    if noise is None:
        noise = random_noise(scaled)
    if is_greedy is None:
        is_greedy = torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device)
    limits = parameters(truncations, scaled.shape[1], scaled.device)
    token_ids = draw_tokens(scaled, noise, is_greedy, *limits)
    expected = reference.draw_tokens(scaled, noise, is_greedy, *limits)
    assert token_ids.dtype == torch.int64
    assert torch.equal(token_ids, expected)
    return token_ids


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
def test_every_truncation_is_exact(vocab_size: int, spread: float, device: torch.device) -> None:
    """E4: distinct scores. Oracle: the ranked vocabulary."""
    scaled = random_scores(len(TRUNCATIONS), vocab_size, spread, 5000, device)
    check_draws(scaled, TRUNCATIONS)


@pytest.mark.parametrize("vocab_size", [1, 65, 200])
@pytest.mark.parametrize("num_values", [1, 3, 12])
def test_equal_scores_rank_by_id(vocab_size: int, num_values: int, device: torch.device) -> None:
    """E4: all scores equal but one, or nearly all; 0.0 and -0.0 mixed. Oracle: the reference."""
    scaled = random_scores(len(TRUNCATIONS), vocab_size, 1.0, 2 * num_values, device)
    scaled[:, ::3] = 0.0
    scaled[:, 1::3] = -0.0
    check_draws(scaled, TRUNCATIONS)
    check_draws(torch.zeros_like(scaled), TRUNCATIONS, noise=torch.zeros_like(scaled))
    # The last token kept is drawn, so that no end may be off by one.
    rising = torch.arange(vocab_size, device=device).expand(scaled.shape) - 300.0 * scaled
    check_draws(scaled, TRUNCATIONS, noise=rising)
    check_draws(torch.zeros_like(scaled), TRUNCATIONS, noise=rising)


def test_no_noise_can_make_it_draw_for_long(device: torch.device) -> None:
    """E4: noise that undoes the order, so that each rejected draw takes one token away.

    Oracle: the reference.
    """
    scaled = random_scores(len(TRUNCATIONS), 300, 2.0, 5000, device)
    check_draws(scaled, TRUNCATIONS, noise=-3.0 * scaled)
    check_draws(scaled, TRUNCATIONS, noise=torch.zeros_like(scaled))


def test_top_tokens_in_one_lane(device: torch.device) -> None:
    """E4: the best tokens are as far apart as blocks are wide. Oracle: the reference."""
    scaled = torch.full((4, 500), -90.0, device=device)
    scaled[:, 7::64] = random_scores(4, 8, 0.5, 5000, device)
    check_draws(scaled, [(2, 1.0, 0.0), (6, 0.9, 0.0), (7, 1.0, 0.0), (8, 0.5, 0.0)])


def test_one_token_dominates(device: torch.device) -> None:
    """E4: nothing else has any mass. Oracle: the reference, and that token."""
    scaled = torch.full((len(TRUNCATIONS), 500), -90.0, device=device)
    scaled[:, 321] = 0.0
    assert check_draws(scaled, TRUNCATIONS).eq(321).all()


def test_masked_tokens_are_never_drawn(device: torch.device) -> None:
    """E4: Oracle: the reference; and no token that scores -inf, were its noise the largest."""
    scaled = random_scores(len(TRUNCATIONS), 500, 0.5, 5000, device)
    is_masked = torch.rand(scaled.shape, generator=torch.Generator().manual_seed(3)) < 0.9
    is_masked = is_masked.to(device) & (scaled < 0.0)
    scaled = scaled.masked_fill(is_masked, -INFINITY)
    noise = random_noise(scaled) + torch.where(is_masked, 1000.0, 0.0)
    token_ids = check_draws(scaled, TRUNCATIONS, noise=noise)
    assert not is_masked.gather(1, token_ids[:, None]).any()


def test_greedy_rows_get_no_noise(device: torch.device) -> None:
    """E4: greedy rows among others. Oracle: the reference, and the first of the best tokens."""
    scaled = random_scores(6, 500, 0.5, 40, device)
    is_greedy = torch.arange(6, device=device) % 2 == 0
    truncations = [(OFF, 1.0, 0.0), (7, 0.8, 0.0)] * 3
    token_ids = check_draws(scaled, truncations, is_greedy=is_greedy)
    assert torch.equal(token_ids[::2], scaled.argmax(-1)[::2])


@pytest.mark.parametrize("value", [float("nan"), INFINITY, -INFINITY, 3.0])
def test_bad_rows_end_in_the_vocabulary(value: float, device: torch.device) -> None:
    """E4: what is no score changes no other row. Oracle: the range; the row beside it alone."""
    good = random_scores(len(TRUNCATIONS), 65, 1.0, 5000, device)
    limits = parameters(TRUNCATIONS, 65, device)
    is_greedy = torch.zeros(len(good), dtype=torch.bool, device=device)
    for is_bad in (torch.ones_like(good, dtype=torch.bool), random_noise(good) > 1.0):
        bad = good.masked_fill(is_bad, value)
        token_ids = draw_tokens(bad, random_noise(bad), is_greedy, *limits)
        assert ((token_ids >= 0) & (token_ids < 65)).all()
    noise = random_noise(good)
    scaled = torch.cat([good[:1].masked_fill(is_bad[:1], value), good[1:]])
    token_ids = draw_tokens(scaled, noise, is_greedy, *limits)
    assert torch.equal(token_ids[1:], reference.draw_tokens(good, noise, is_greedy, *limits)[1:])


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    """E4: Oracle: every row drawn alone, from strided memory."""
    scaled = random_scores(4, 501, 1.0, 5000, device)
    truncations = [TRUNCATIONS[index] for index in (0, 4, 6, 10)]
    together = check_draws(scaled, truncations)
    noise = random_noise(scaled)
    for row, token_id in enumerate(together):
        wide = torch.stack([scaled[row], torch.full_like(scaled[row], torch.nan)], 1)[None, :, 0]
        alone = check_draws(wide, truncations[row : row + 1], noise=noise[row : row + 1])
        assert alone[0] == token_id


def test_no_rows_give_no_tokens(device: torch.device) -> None:
    """E4: an empty batch launches nothing. Oracle: the shape."""
    none = torch.zeros(0, device=device)
    rows = torch.zeros(0, 65, device=device)
    assert draw_tokens(rows, rows, none.bool(), none.long(), none, none).shape == (0,)


# The fixtures hold nothing that an example could change.
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    choices=st.lists(st.integers(0, 4), min_size=1, max_size=150),
    top_k=st.integers(1, 160),
    top_p=st.sampled_from([0.01, 0.25, 0.5, 0.75, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_any_few_values_are_exact(
    choices: list[int], top_k: int, top_p: float, min_p: float, seed: int, device: torch.device
) -> None:
    """E4: many ties, on the ends of nuclei too. Oracle: the reference."""
    values = torch.cat(
        [
            torch.tensor([0.0, -0.0, -INFINITY], device=device),
            shared_scores(64, 1.0, device)[:2],
        ]
    )
    scaled = values[torch.tensor(choices, device=device)][None]
    scaled[0, seed % len(choices)] = 0.0
    check_draws(scaled, [(top_k, top_p, min_p)], noise=random_noise(scaled, seed))


@pytest.mark.gpu
@pytest.mark.parametrize(("spread", "num_values"), [(0.5, 10**6), (8.0, 10**6), (1.0, 7)])
def test_whole_vocabularies(spread: float, num_values: int) -> None:
    """E4: 64 rows of a real vocabulary, flat, peaked and tied. Oracle: the reference."""
    device = torch.device("cuda")
    more = [(1000, 0.9, 0.0), (100_000, 0.7, 0.0), (OFF, 0.001, 0.0), (OFF, 0.95, 0.1)]
    truncations = ([*TRUNCATIONS, *more] * 4)[:64]
    scaled = random_scores(64, QWEN_VOCAB_SIZE, spread, num_values, device)
    check_draws(scaled, truncations)
    check_draws(scaled, truncations, noise=torch.zeros_like(scaled))


@pytest.mark.gpu
def test_compiled_and_captured() -> None:
    """E5: inside a compiled function, in a CUDA graph; inputs are left alone.

    Oracle: the op called directly.
    """
    device = torch.device("cuda")
    scaled = random_scores(8, 5000, 1.0, 5000, device)
    noise = random_noise(scaled)
    is_greedy = torch.arange(8, device=device) == 3
    limits = parameters(TRUNCATIONS[:8], 5000, device)

    def step(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        peaks = logits.amax(-1, keepdim=True)
        scaled = (logits - peaks) / 0.5
        return draw_tokens(scaled, noise * 1.0, is_greedy, *limits), scaled

    compiled = torch.compile(step, fullgraph=True)
    logits = scaled / 2.0
    compiled(logits, noise)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, after = compiled(logits, noise)
    for seed in (1, 2):
        noise.copy_(random_noise(scaled, seed))
        before = logits.clone(), noise.clone()
        graph.replay()
        expected, expected_scaled = step(logits, noise)
        assert torch.equal(token_ids, expected) and torch.equal(after, expected_scaled)
        assert torch.equal(logits, before[0]) and torch.equal(noise, before[1])
