"""Rows to tokens: every parameter alone and mixed, alone and in a batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import Sampled, SamplingPlan, plan_sampling, sample
from engine.sampling_rows import PADDING_SLOT, SamplingTable
from tests.engine.sampling_cases import (
    BAREST,
    WIDEST,
    build_table,
    params_from,
    random_batch,
    sample_rows,
)
from tests.oracle.sampling import Row, chi_square_p, choose, probabilities

MIN_P_VALUE = 0.01
VOCAB = 24
TOKENS = st.integers(0, VOCAB - 1)


def eighths(low: int, high: int) -> st.SearchStrategy[float]:
    """Values whose sums float32 holds exactly: ties are ties in the oracle too, or nowhere."""
    return st.integers(8 * low, 8 * high).map(lambda value: value / 8)


ROWS = st.builds(
    Row,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.125, 4.0, width=32)),
    top_k=st.one_of(st.just(0), st.just(-1), st.integers(1, 30)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    presence_penalty=st.one_of(st.just(0.0), eighths(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), eighths(-2, 2)),
    repetition_penalty=st.sampled_from([1.0, 0.5, 2.0]),
    logit_bias=st.dictionaries(TOKENS, eighths(-100, 100), max_size=4),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    eos_ids=st.lists(TOKENS, max_size=2),
)
REQUESTS = st.tuples(
    ROWS,
    st.lists(TOKENS, min_size=1, max_size=8),
    st.lists(TOKENS, max_size=8),
    st.lists(eighths(-8, 8), min_size=VOCAB, max_size=VOCAB),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(REQUESTS, min_size=1, max_size=6))
def test_any_mix_of_parameters_chooses_the_oracles_token(
    requests: list[tuple[Row, list[int], list[int], list[float]]],
) -> None:
    """E4, V6: each row by its own parameters and seed stream. Oracle: one row in float64."""
    rows, prompts, outputs, logits = zip(*requests, strict=True)
    sampled = sample_rows(torch.tensor(logits), rows, prompts, outputs)
    assert not sampled.is_bad.any()
    for index, (row, prompt, output, row_logits) in enumerate(requests):
        assert sampled.token_ids[index].item() in choose(row_logits, row, prompt, output)


@settings(deadline=None, max_examples=100)
@given(st.lists(REQUESTS, min_size=1, max_size=6))
def test_a_wider_plan_changes_no_token(
    requests: list[tuple[Row, list[int], list[int], list[float]]],
) -> None:
    """E4: so batch composition changes none either. Oracle: the batch's own plan."""
    rows, prompts, outputs, logits = zip(*requests, strict=True)
    planned = sample_rows(torch.tensor(logits), rows, prompts, outputs)
    widest = sample_rows(torch.tensor(logits), rows, prompts, outputs, WIDEST)
    assert torch.equal(planned.token_ids, widest.token_ids)


LOGITS = [2.0, 1.75, 1.5, 1.125, 0.5, 0.25, 0.0, -0.5, -1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.6),
        Row(temperature=2.5),
        Row(top_k=5),
        Row(top_k=1),
        Row(top_p=0.8),
        Row(min_p=0.15),
        Row(temperature=0.7, top_k=8, top_p=0.9, min_p=0.05),
        Row(temperature=1.5, presence_penalty=1.0, frequency_penalty=0.5),
        Row(repetition_penalty=1.6, top_p=0.95),
        Row(logit_bias={0: -100.0, 9: 4.0}, top_k=6),
        Row(min_tokens=5, stop_token_ids=[0, 2], eos_ids=[1], top_p=0.9),
    ],
    ids=lambda row: "-".join(
        f.name for f in dataclasses.fields(row) if getattr(row, f.name) != f.default
    ),
)
def test_tokens_follow_the_filtered_distribution(row: Row) -> None:
    """E4: 200 seeds × 100 positions. Oracle: chi-square against exact probabilities.

    Positions stay the index of the noise while counts stand still, so that all draws have
    one distribution; min_tokens stays out of reach of the positions.
    """
    prompt, output = [0, 3], [1, 1, 4]
    if row.min_tokens:
        row = dataclasses.replace(row, min_tokens=1000)
    seeded = [dataclasses.replace(row, seed=1000 + index) for index in range(200)]
    table = build_table(seeded, [prompt] * 200, [output] * 200, len(LOGITS))
    slots = torch.arange(1, 201).repeat_interleave(100)
    positions = torch.arange(100).repeat(200)
    plan = plan_sampling([params_from(row)], [0])
    logits = torch.tensor(LOGITS).expand(20_000, -1)
    sampled = sample(logits, table, slots, positions, plan)
    counts = torch.bincount(sampled.token_ids, minlength=len(LOGITS)).tolist()
    shares = probabilities(LOGITS, row, prompt, output)
    assert chi_square_p(counts, shares) > MIN_P_VALUE


def test_a_row_is_a_function_of_itself() -> None:
    """E4: Oracle: the same rows alone, permuted, padded, and over a padded vocabulary."""
    logits, rows, outputs = random_batch(12, 300)
    prompts = [[1, 2]] * 12
    batch = sample_rows(logits, rows, prompts, outputs).token_ids
    for index in range(12):
        part = slice(index, index + 1)
        alone = sample_rows(logits[part], rows[part], prompts[part], outputs[part])
        assert torch.equal(alone.token_ids, batch[part])
    wide = torch.cat([logits, torch.full((12, 20), -torch.inf)], dim=1)
    assert torch.equal(sample_rows(wide, rows, prompts, outputs).token_ids, batch)

    table = build_table(rows, prompts, outputs, 300)
    positions = torch.tensor([len(output) for output in outputs])
    plan = plan_sampling([params_from(row) for row in rows], positions.tolist())
    order = torch.tensor([7, 0, 11, 3, 5, 1, 2, 10, 4, 9, 8, 6])
    shuffled = sample(logits[order], table, 1 + order, positions[order], plan)
    assert torch.equal(shuffled.token_ids, batch[order])
    slots = torch.cat([torch.arange(1, 13), torch.full((4,), PADDING_SLOT)])
    rubbish = torch.cat([logits, torch.full((4, 300), torch.nan)])
    padded = sample(rubbish, table, slots, torch.cat([positions, positions[:4]]), plan)
    assert torch.equal(padded.token_ids[:12], batch)


def test_rows_of_one_request_sample_as_its_steps_would() -> None:
    """V6: k + 1 rows of a slot at successive positions. Oracle: one step per row."""
    logits, _, _ = random_batch(4, 300)
    row = Row(temperature=0.8, top_p=0.95, seed=8)
    table = build_table([row], [[1]], [[]], 300)
    plan = plan_sampling([params_from(row)], [0])
    slots, positions = torch.ones(4, dtype=torch.int64), torch.arange(3, 7)
    together = sample(logits, table, slots, positions, plan).token_ids
    for index in range(4):
        part = slice(index, index + 1)
        alone = sample(logits[part], table, slots[part], positions[part], plan)
        assert torch.equal(alone.token_ids, together[part])


def test_penalties_follow_the_counted_tokens_over_a_run() -> None:
    """E4: 12 steps with device-side counting. Oracle: lists of tokens, one row at a time."""
    rows = [
        Row(temperature=0.0, presence_penalty=0.8, repetition_penalty=1.3),
        Row(temperature=0.9, frequency_penalty=0.7, seed=5),
        Row(temperature=0.0, frequency_penalty=2.0),
    ]
    prompts, outputs = [[3, 4], [0], [7]], [[], [], []]
    logits = torch.tensor([LOGITS] * 3)
    table = build_table(rows, prompts, [[], [], []], len(LOGITS))
    plan = plan_sampling([params_from(row) for row in rows], [0, 0, 0])
    slots = torch.tensor([1, 2, 3])
    for step in range(12):
        chosen = sample(logits, table, slots, torch.full((3,), step), plan).token_ids
        table.count_tokens(slots, chosen)
        for row, prompt, output, token_id in zip(
            rows, prompts, outputs, chosen.tolist(), strict=True
        ):
            assert token_id in choose(LOGITS, row, prompt, output)
            output.append(token_id)
    assert len(set(outputs[2])) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    """E4: alone and beside sampled rows. Oracle: the lowest id of the maximum."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-1.0, -5.0, -1.0, -1.0]], dtype=dtype)
    rows = [Row(temperature=0.0), Row(temperature=0.0)]
    empty: list[list[int]] = [[], []]
    for plan in (None, WIDEST):
        assert sample_rows(logits, rows, empty, empty, plan).token_ids.tolist() == [1, 0]


@pytest.mark.parametrize("plan", [WIDEST, BAREST])
def test_low_precision_logits_are_computed_in_float32(plan: SamplingPlan) -> None:
    """E4: Oracle: the same logits cast to float32 first."""
    logits, rows, outputs = random_batch(400, 300)
    # Far from the peak bfloat16 differences are coarse; a high temperature lets that matter.
    low = (logits * 10).bfloat16()
    rows = [dataclasses.replace(row, temperature=20 * row.temperature) for row in rows]
    prompts = [[1]] * 400
    expected = sample_rows(low.float(), rows, prompts, outputs, plan)
    actual = sample_rows(low, rows, prompts, outputs, plan)
    for low_result, result in zip(actual, expected, strict=True):
        assert result is None if low_result is None else torch.equal(low_result, result)


def test_min_tokens_hides_stops_until_then() -> None:
    """E4: Oracle: token min_tokens + 1 is the first that may be a stop."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0]])
    row = Row(temperature=0.0, min_tokens=3, stop_token_ids=[1], eos_ids=[0])
    chosen = [
        sample_rows(logits, [row], [[]], [[3] * count]).token_ids.item() for count in range(5)
    ]
    assert chosen == [2, 2, 2, 0, 0]


def test_masking_every_token_is_bad_for_that_row_alone() -> None:
    """E4: Oracle: is_bad and the neighbour's token."""
    logits = torch.tensor([[5.0, 4.0], [5.0, 4.0]])
    rows = [Row(temperature=0.0, min_tokens=3, eos_ids=[0, 1]), Row(temperature=0.0)]
    sampled = sample_rows(logits, rows, [[], []], [[], []])
    assert sampled.is_bad.tolist() == [True, False]
    assert sampled.token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("plan", [WIDEST, BAREST, dataclasses.replace(WIDEST, is_all_greedy=True)])
def test_poisoned_rows_are_reported_and_harm_no_other(poison: float, plan: SamplingPlan) -> None:
    """E4: Oracle: the batch without the poisoned rows; ids stay inside the vocabulary."""
    logits, rows, outputs = random_batch(12, 300)
    prompts = [[1]] * 12
    clean = sample_rows(logits, rows, prompts, outputs, plan)
    assert not clean.is_bad.any()
    logits[3, 299] = poison
    logits[4, 2] = poison
    logits[6] = poison
    logits[8] = -math.inf
    logits[9, 0] = -math.inf
    sampled = sample_rows(logits, rows, prompts, outputs, plan)
    assert sampled.is_bad.nonzero().flatten().tolist() == [3, 4, 6, 8]
    assert torch.equal(sampled.token_ids[~sampled.is_bad], clean.token_ids[~sampled.is_bad])
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < 300)).all()


@pytest.mark.parametrize("is_top_k_small", [True, False])
def test_compiled_sampling_chooses_the_same_tokens(is_top_k_small: bool) -> None:
    """E4: one graph without breaks, counting included. Oracle: the eager functions."""
    logits, rows, outputs = random_batch(10, 300)
    plan = WIDEST
    if is_top_k_small:
        rows = [dataclasses.replace(row, top_k=20) for row in rows]
        plan = dataclasses.replace(WIDEST, is_top_k_small=True)
    eager_table = build_table(rows, [[1]] * 10, outputs, 300)
    table = build_table(rows, [[1]] * 10, outputs, 300)
    slots = torch.arange(1, 11)
    positions = torch.tensor([len(output) for output in outputs])

    def step(logits: Tensor, table: SamplingTable, slots: Tensor, positions: Tensor) -> Sampled:
        sampled = sample(logits, table, slots, positions, plan)
        table.count_tokens(slots, sampled.token_ids)
        return sampled

    compiled_step = torch.compile(step, fullgraph=True)
    for offset in range(3):
        eager = step(logits, eager_table, slots, positions + offset)
        compiled = compiled_step(logits, table, slots, positions + offset)
        assert torch.equal(compiled.token_ids, eager.token_ids)
        assert torch.equal(compiled.top_ids, eager.top_ids)
        torch.testing.assert_close(compiled.logprobs, eager.logprobs, atol=2e-6, rtol=0)
        assert torch.equal(table.output_counts, eager_table.output_counts)
