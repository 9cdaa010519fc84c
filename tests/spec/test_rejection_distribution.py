"""What a verify step commits is distributed as what plain sampling chooses, over runs of tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.sampler import plan_sampling
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import TORCH_SAMPLE
from graphs.kernels.sample.reference import philox_words
from graphs.rows import NO_DRAFT
from spec.rejection import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    choose_argmax,
    choose_sampled,
    target_probs,
)
from tests.engine.sampling_cases import WIDEST, build_table, params_from
from tests.oracle.sampling import Row, chi_square_p, philox4x32_10, probabilities
from tests.spec.rejection_cases import (
    VerifyLoop,
    random_target,
    run_plain,
    table_of_copies,
)

MIN_P_VALUE = 0.01
NUM_SAMPLES, VOCAB, ROOM, NUM_DRAFTS = 20_000, 5, 3, 2
PROMPT = [3, 0]
TARGET = random_target(VOCAB, 1.2, 5)
DRAFT = (TARGET + random_target(VOCAB, 1.0, 6)).softmax(-1)
ROWS = [
    Row(seed=100),
    Row(seed=100, temperature=0.7),
    Row(seed=100, top_k=3),
    Row(seed=100, top_p=0.8),
    Row(seed=100, temperature=1.5, top_k=4, top_p=0.95, min_p=0.05),
    Row(seed=100, presence_penalty=0.8, frequency_penalty=0.7, repetition_penalty=1.3),
]
# The table has room for so many biases that they are most of the time.
BIASED = Row(seed=100, logit_bias={1: 1.0}, min_tokens=2, eos_ids=[2])


def name_of(row: Row) -> str:
    names = [f.name for f in dataclasses.fields(row) if f.name != "seed"]
    return "-".join(name for name in names if getattr(row, name) != getattr(Row(), name))


def run_shares(row: Row) -> list[float]:
    """The probability of every run of ROOM tokens, in order, by plain sampling."""
    shares = []
    for run in itertools.product(range(VOCAB), repeat=ROOM):
        share, output = 1.0, []
        for token_id in run:
            last = [*PROMPT, *output][-1]
            share *= probabilities(TARGET[last].tolist(), row, PROMPT, output)[token_id]
            output.append(token_id)
        shares.append(share)
    return shares


def count_runs(outputs: Tensor) -> list[int]:
    places = VOCAB ** torch.arange(ROOM - 1, -1, -1)
    return torch.bincount((outputs * places).sum(-1), minlength=VOCAB**ROOM).tolist()


def start(row: Row) -> tuple[SamplingTable, VerifyLoop]:
    table = table_of_copies(row, PROMPT, NUM_SAMPLES, VOCAB)
    pending = torch.full((NUM_SAMPLES,), PROMPT[-1])
    return table, VerifyLoop(TARGET, table, pending, ROOM)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_argmax_drafts_leave_the_distribution(row: Row) -> None:
    """V6: drafts by a rule, 20k requests, runs of 3 tokens. Oracle: chi-square, exact shares."""
    table, loop = start(row)
    plan = plan_sampling([params_from(row)], [0])
    likeliest = DRAFT.argmax(-1)
    while not loop.is_full:
        first = likeliest[loop.pending]
        loop.step(
            torch.stack([first, likeliest[first]], 1),
            lambda logits, rows: choose_argmax(logits, rows, table, plan, TORCH_SAMPLE),
        )
    assert chi_square_p(count_runs(loop.outputs), run_shares(row)) > MIN_P_VALUE


def draw_drafts(loop: VerifyLoop, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """NUM_DRAFTS drafts [N, k], each drawn after the one before it, and their q [N, k, V]."""
    last, drafts, probs = loop.pending, [], []
    for _ in range(NUM_DRAFTS):
        probs.append(DRAFT[last])
        last = torch.multinomial(probs[-1], 1, generator=generator)[:, 0]
        drafts.append(last)
    return torch.stack(drafts, 1), torch.stack(probs, 1)


def sampled_chooser(
    table: SamplingTable, row: Row, probs: Tensor
) -> Callable[[Tensor, VerifyRows], VerifyChoice]:
    plan = plan_sampling([params_from(row)], [0])
    return lambda logits, rows: choose_sampled(logits, rows, table, plan, TORCH_SAMPLE, probs)


@pytest.mark.parametrize(
    ("row", "missing"),
    [*((row, False) for row in (*ROWS, BIASED)), (ROWS[1], True), (ROWS[-1], True)],
    ids=lambda value: name_of(value) if isinstance(value, Row) else ["all", "missing"][value],
)
def test_sampled_drafts_leave_the_distribution(row: Row, missing: bool) -> None:
    """V7: drafts of another softmax, some missing. Oracle: chi-square, exact shares."""
    table, loop = start(row)
    generator = torch.Generator().manual_seed(9)
    seen = set()
    while not loop.is_full:
        drafts, probs = draw_drafts(loop, generator)
        if missing:
            # Which are missing must not follow from what they would be.
            drafts[::3, 1:] = NO_DRAFT
            drafts[1::3] = NO_DRAFT
        choice = loop.step(drafts, sampled_chooser(table, row, probs))
        seen |= set(choice.num_committed.tolist())
    assert seen == {1, 2, 3}
    assert chi_square_p(count_runs(loop.outputs), run_shares(row)) > MIN_P_VALUE


def test_acceptance_is_the_probability_of_the_draft() -> None:
    """C-E4: temperature 0.7, every token as the draft of a first row, and drafts drawn from q.

    Oracle: chi-square, p(draft), and the sum of min(p, q).
    """
    row = Row(seed=7, temperature=0.7)
    p = probabilities(TARGET[PROMPT[-1]].tolist(), row, PROMPT, [])
    plan = plan_sampling([params_from(row)], [0])
    for draft in range(VOCAB):
        table, loop = start(row)
        drafts = torch.full((NUM_SAMPLES, 1), draft)
        choice = loop.step(
            drafts, lambda logits, rows, t=table: choose_argmax(logits, rows, t, plan, TORCH_SAMPLE)
        )
        num_accepted = int((choice.num_committed == 2).sum())
        counts = [num_accepted, NUM_SAMPLES - num_accepted]
        assert chi_square_p(counts, [p[draft], 1 - p[draft]]) > MIN_P_VALUE

    table, loop = start(row)
    drafts, probs = draw_drafts(loop, torch.Generator().manual_seed(10))
    choice = loop.step(drafts, sampled_chooser(table, row, probs))
    num_accepted = int((choice.num_committed > 1).sum())
    share = sum(map(min, p, DRAFT[PROMPT[-1]].tolist()))
    counts = [num_accepted, NUM_SAMPLES - num_accepted]
    assert chi_square_p(counts, [share, 1 - share]) > MIN_P_VALUE


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    """V7: their drafts drawn from q too. Oracle: the likeliest token, step by step."""
    rows = [Row(temperature=0.0), Row(seed=4, top_k=3), Row(temperature=0.0, frequency_penalty=1.0)]
    prompts = [[index, 0] for index in range(3)]
    table, plain_table = (build_table(rows, prompts, [[]] * 3, VOCAB) for _ in range(2))
    pending = torch.tensor([prompt[-1] for prompt in prompts])
    expected = run_plain(TARGET, plain_table, WIDEST, pending, 30)
    generator, seen = torch.Generator().manual_seed(1), set()
    loop = VerifyLoop(TARGET, table, pending, 30)
    while not loop.is_full:
        drafts, probs = draw_drafts(loop, generator)
        choice = loop.step(
            drafts,
            lambda logits, rows, q=probs: choose_sampled(
                logits, rows, table, WIDEST, TORCH_SAMPLE, q
            ),
        )
        seen |= set(choice.num_committed[::2].tolist())
    assert torch.equal(loop.outputs[::2], expected[::2])
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("row", [*ROWS, BIASED, Row(temperature=0.0)], ids=name_of)
def test_target_probs_are_those_that_sampling_draws_from(row: Row) -> None:
    """V7: by the batch's own plan and by the widest. Oracle: one row in float64."""
    table = build_table([row], [PROMPT], [[]], VOCAB)
    slots, positions = torch.tensor([1]), torch.tensor([0])
    params = table.gather(slots)
    for plan in (plan_sampling([params_from(row)], [0]), WIDEST):
        scaled, _ = TORCH_SAMPLE.adjust_logits(
            TARGET[:1],
            slots,
            positions,
            params,
            table.adjustments(),
            has_penalties=plan.has_penalties,
            has_bias=plan.has_bias,
            has_min_tokens=plan.has_min_tokens,
        )
        probs = target_probs(scaled, table.token_ids, params, plan)
        if row.temperature == 0.0:
            assert probs[0].tolist() == [float(t == TARGET[0].argmax()) for t in range(VOCAB)]
        else:
            expected = torch.tensor([probabilities(TARGET[0].tolist(), row, PROMPT, [])])
            torch.testing.assert_close(probs, expected)


@pytest.mark.parametrize("stream", [0, ACCEPT_STREAM, RESIDUAL_STREAM, 2**32 - 1])
def test_streams_are_a_counter_of_the_generator(stream: int) -> None:
    """V6, V7: Oracle: the published generator in unbounded integers."""
    for seed, position, group in [(0, 0, 0), (-5, 77, 62079), (2**63 - 1, 2**32 - 1, 1)]:
        numbers = (torch.tensor([seed]), torch.tensor([position]), torch.tensor([[group]]))
        words = philox_words(*numbers, stream)
        key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        expected = philox4x32_10((group, position, stream, 0), key)
        assert tuple(word.item() for word in words) == expected
    assert len({0, ACCEPT_STREAM, RESIDUAL_STREAM}) == 3
