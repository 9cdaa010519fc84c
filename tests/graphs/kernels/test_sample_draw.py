"""Drawing tokens from truncated distributions, against the reference that ranks them all.

The kernel's exp may be an ulp from torch's, which moves the end of a nucleus. Scores here are
values on which both agree, found by running both, and the noise is the kernel's own: results must
then be equal.
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
from graphs.kernels.sample.configs import NUM_ROUNDS
from graphs.kernels.sample.draw_kernel import MAX_DRAWS
from graphs.kernels.sample.ops import draw_tokens
from graphs.kernels.sample.rows import RowParams
from tests.graphs.kernels.sample_cases import kernel_noise, neutral_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [1, 63, 65, pytest.param(500, marks=pytest.mark.sanitize), 1100]
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
    (600, 0.3, 0.0),
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


def rows_from(truncations: Sequence[Truncation], scaled: Tensor, seed: int = 0) -> RowParams:
    """Rows of successive seeds."""
    top_k, top_p, min_p = zip(*truncations, strict=True)
    vocab_size, device = scaled.shape[1], scaled.device
    rows = neutral_rows(len(scaled), vocab_size, device)
    return rows._replace(
        top_k=torch.tensor(top_k, device=device).clamp(max=vocab_size),
        top_p=torch.tensor(top_p, device=device),
        min_p=torch.tensor(min_p, device=device),
        seed=rows.seed + seed,
    )


def noise_of(rows: RowParams, positions: Tensor, vocab_size: int) -> Tensor:
    token_ids = torch.arange(vocab_size, device=positions.device)[None]
    return kernel_noise(rows.seed, positions, token_ids)


def draw(scaled: Tensor, positions: Tensor, rows: RowParams, has_truncation: bool = True) -> Tensor:
    token_ids = torch.arange(scaled.shape[1], device=scaled.device)[None]
    return draw_tokens(
        scaled, token_ids, positions, rows, has_truncation=has_truncation, is_top_k_small=False
    )


def check_rows(
    scaled: Tensor, positions: Tensor, rows: RowParams, has_truncation: bool = True
) -> Tensor:
    """The op's tokens, which must be the reference's."""
    drawn = draw(scaled, positions, rows, has_truncation)
    expected = reference.draw_tokens(
        scaled,
        torch.arange(scaled.shape[1], device=scaled.device)[None],
        positions,
        rows,
        has_truncation=has_truncation,
        is_top_k_small=False,
        make_noise=kernel_noise,
    )
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, expected)
    return drawn


def check_draws(scaled: Tensor, truncations: Sequence[Truncation], seed: int = 0) -> Tensor:
    rows = rows_from(truncations, scaled, seed)
    return check_rows(scaled, rows.seed % 5, rows)


def leave_to_gpu(device: torch.device, is_left: bool) -> None:
    """Skip a case that only repeats, at more cost, what others show: interpreted draws are slow."""
    if is_left and device.type == "cpu":
        pytest.skip("interpreted in another case")


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("spread", [0.5, 8.0], ids=["flat", "peaked"])
def test_every_truncation_is_exact(vocab_size: int, spread: float, device: torch.device) -> None:
    """E4: distinct scores. Oracle: the ranked vocabulary."""
    leave_to_gpu(device, spread > 1.0 and vocab_size > 100)
    scaled = random_scores(len(TRUNCATIONS), vocab_size, spread, 5000, device)
    check_draws(scaled, TRUNCATIONS)


@pytest.mark.parametrize("vocab_size", [1, 65, 200])
@pytest.mark.parametrize("num_values", [1, 3, 12])
def test_equal_scores_rank_by_id(vocab_size: int, num_values: int, device: torch.device) -> None:
    """E4: all scores equal but one, or nearly all; 0.0 and -0.0 mixed. Oracle: the reference."""
    leave_to_gpu(device, vocab_size == 200 and num_values != 3)
    scaled = random_scores(len(TRUNCATIONS), vocab_size, 1.0, 2 * num_values, device)
    scaled[:, ::3] = 0.0
    scaled[:, 1::3] = -0.0
    check_draws(scaled, TRUNCATIONS)
    check_draws(torch.zeros_like(scaled), TRUNCATIONS)


# A few tokens more, and top-k's candidates may be too many for one program.
@pytest.mark.parametrize("vocab_size", [60, 70])
def test_no_end_is_off_by_one(vocab_size: int, device: torch.device) -> None:
    """E4: every seed draws from a few equal tokens. Oracle: the reference, and which are drawn."""
    leave_to_gpu(device, vocab_size == 70)
    scaled = torch.full((20, vocab_size), -90.0, device=device)
    scaled[:, 5:vocab_size:13] = 0.0
    for truncation, num_kept in (((4, 1.0, 0.0), 4), ((OFF, 0.5, 0.0), 3), ((4, 0.5, 0.0), 2)):
        token_ids = check_draws(scaled, [truncation] * 20)
        assert token_ids.unique().tolist() == [5 + 13 * rank for rank in range(num_kept)]


@pytest.mark.parametrize("vocab_size", SIZES)
def test_rows_without_truncation(vocab_size: int, device: torch.device) -> None:
    """E4: one round and no more, sampled and greedy rows. Oracle: the reference."""
    scaled = random_scores(7, vocab_size, 1.0, 50, device)
    rows = rows_from([(OFF, 1.0, 0.0)] * 7, scaled)
    rows = rows._replace(is_greedy=rows.seed % 3 == 1)
    check_rows(scaled, rows.seed + 4, rows, has_truncation=False)


@pytest.mark.parametrize("spread", [0.0, 2.0, 12.0])
def test_no_token_left_out_is_the_best(spread: float, device: torch.device) -> None:
    """E4: many seeds, blocks in which any token, few or none come near. Oracle: the reference."""
    leave_to_gpu(device, spread != 2.0)
    scaled = random_scores(48, 640, max(spread, 1.0), 5000, device)
    scaled = scaled if spread else torch.zeros_like(scaled)
    # One block has nothing that noise could lift, and two only equal scores.
    scaled[:, 128:192] -= 40.0
    scaled[1::2, 256:384] = -3.0
    scaled[:, 600] = 0.0
    rows = rows_from([(OFF, 1.0, 0.0)] * 48, scaled)
    rows = rows._replace(is_greedy=rows.seed % 8 == 1)
    check_rows(scaled, rows.seed % 7, rows, has_truncation=False)


def stubborn_seeds(vocab_size: int, device: torch.device) -> Tensor:
    """The 2 of 20,000 seeds with most tokens whose noise is larger than that of all before them."""
    seeds = torch.arange(20_000, device=device)
    token_ids = torch.arange(vocab_size, device=device)[None]
    noise = reference.vocabulary_noise(seeds, torch.zeros_like(seeds), token_ids)
    num_records = (noise == noise.cummax(1).values).sum(1)
    most = num_records.topk(2)
    assert most.values.min() > NUM_ROUNDS + MAX_DRAWS.value
    return seeds[most.indices]


def test_no_noise_can_make_it_draw_for_long(device: torch.device) -> None:
    """E4: equal scores, and noise by which every draw rejected takes few tokens away.

    Oracle: the reference.
    """
    scaled = torch.zeros(2, 300, device=device)
    for top_p in (1e-30, 1e-2):
        rows = rows_from([(OFF, top_p, 0.0)] * 2, scaled)
        rows = rows._replace(seed=stubborn_seeds(300, device))
        check_rows(scaled, torch.zeros_like(rows.seed), rows)


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
    rows = rows_from(TRUNCATIONS, scaled)
    positions = torch.zeros_like(rows.seed)
    is_masked = (noise_of(rows, positions, 500) > 0.0) & (scaled < 0.0)
    scaled = scaled.masked_fill(is_masked, -INFINITY)
    token_ids = check_rows(scaled, positions, rows)
    assert not is_masked.gather(1, token_ids[:, None]).any()


def test_greedy_rows_get_no_noise(device: torch.device) -> None:
    """E4: greedy rows among others. Oracle: the reference, and the first of the best tokens."""
    scaled = random_scores(6, 500, 0.5, 40, device)
    rows = rows_from([(OFF, 1.0, 0.0), (7, 0.8, 0.0)] * 3, scaled)
    rows = rows._replace(is_greedy=rows.seed % 2 == 0)
    token_ids = check_rows(scaled, rows.seed, rows)
    assert torch.equal(token_ids[::2], scaled.argmax(-1)[::2])


@pytest.mark.parametrize("value", [float("nan"), INFINITY, -INFINITY, 3.0])
def test_bad_rows_end_in_the_vocabulary(value: float, device: torch.device) -> None:
    """E4: what is no score changes no other row. Oracle: the range; the row beside it alone."""
    leave_to_gpu(device, value in (INFINITY, 3.0))
    truncations = TRUNCATIONS[::2]
    good = random_scores(len(truncations), 65, 1.0, 5000, device)
    rows = rows_from(truncations, good)
    for is_bad in (torch.ones_like(good, dtype=torch.bool), torch.rand(good.shape) < 0.3):
        bad = good.masked_fill(is_bad.to(device), value)
        token_ids = draw(bad, rows.seed, rows)
        assert ((token_ids >= 0) & (token_ids < 65)).all()
    scaled = torch.cat([bad[:1], good[1:]])
    drawn = draw(scaled, rows.seed, rows)
    assert torch.equal(drawn[1:], check_rows(good, rows.seed, rows)[1:])


def test_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    """E4: Oracle: every row drawn alone, from strided memory."""
    scaled = random_scores(4, 501, 1.0, 5000, device)
    truncations = [TRUNCATIONS[index] for index in (0, 4, 6, 10)]
    rows = rows_from(truncations, scaled)
    together = check_rows(scaled, rows.seed, rows)
    for row, token_id in enumerate(together):
        wide = torch.stack([scaled[row], torch.full_like(scaled[row], torch.nan)], 1)[None, :, 0]
        # Columns of a table, as the parameters of rows may be.
        part = RowParams(*(torch.stack([value, value], 1)[row : row + 1, 0] for value in rows))
        assert check_rows(wide, part.seed, part)[0] == token_id


def test_no_rows_give_no_tokens(device: torch.device) -> None:
    """E4: an empty batch launches nothing. Oracle: the shape."""
    rows = neutral_rows(0, 65, device)
    assert draw(torch.zeros(0, 65, device=device), rows.seed, rows).shape == (0,)


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
    check_draws(scaled, [(top_k, top_p, min_p)], seed)


@pytest.mark.gpu
@pytest.mark.parametrize(("spread", "num_values"), [(0.5, 10**6), (8.0, 10**6), (1.0, 7)])
def test_whole_vocabularies(spread: float, num_values: int) -> None:
    """E4: 64 rows of a real vocabulary, flat, peaked and tied. Oracle: the reference."""
    device = torch.device("cuda")
    more = [(1000, 0.9, 0.0), (100_000, 0.7, 0.0), (OFF, 0.001, 0.0), (OFF, 0.95, 0.1)]
    truncations = ([*TRUNCATIONS, *more] * 4)[:64]
    scaled = random_scores(64, QWEN_VOCAB_SIZE, spread, num_values, device)
    check_draws(scaled, truncations)
    check_draws(scaled, truncations, 64)


@pytest.mark.gpu
def test_compiled_and_captured() -> None:
    """E5: inside a compiled function, in a CUDA graph; inputs are left alone.

    Oracle: the op called directly.
    """
    device = torch.device("cuda")
    scaled = random_scores(8, 5000, 1.0, 5000, device)
    rows = rows_from(TRUNCATIONS[:8], scaled)
    rows = rows._replace(is_greedy=rows.seed == 3)

    def step(logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        peaks = logits.amax(-1, keepdim=True)
        scaled = (logits - peaks) / 0.5
        return draw(scaled, positions * 1, rows), scaled

    compiled = torch.compile(step, fullgraph=True)
    logits, positions = scaled / 2.0, torch.zeros_like(rows.seed)
    compiled(logits, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids, after = compiled(logits, positions)
    for position in (1, 2):
        positions.fill_(position)
        before = logits.clone()
        graph.replay()
        expected, expected_scaled = step(logits, positions)
        assert torch.equal(token_ids, expected) and torch.equal(after, expected_scaled)
        assert torch.equal(logits, before) and (positions == position).all()
