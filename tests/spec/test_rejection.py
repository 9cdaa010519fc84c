"""Accepting drafts by matching them: tokens, cuts and counts, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.batch import StepResult
from engine.commit import commit_token
from engine.request import NewRequest, SamplingParams
from engine.request_state import RequestState
from engine.sampler import Sampled, SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import TORCH_SAMPLE
from graphs.rows import NO_DRAFT
from spec.rejection import accept_argmax, choose_argmax, choose_sampled, choose_synthetic
from tests.engine.sampling_cases import BAREST, CPU, WIDEST, build_table
from tests.oracle.sampling import Row, adjust, chi_square_p
from tests.spec.rejection_cases import (
    VerifyLoop,
    random_target,
    run_plain,
    table_of_copies,
)

MIN_P_VALUE = 0.01
VOCAB, ROOM = 24, 40
MIXED = [
    Row(temperature=0.0),
    Row(temperature=0.7, seed=11),
    Row(temperature=1.3, top_k=5, seed=-2),
    Row(top_p=0.8, seed=3),
    Row(min_p=0.1, seed=4, logit_bias={3: 2.0, 7: -100.0}),
    Row(temperature=0.0, frequency_penalty=1.5),
    Row(frequency_penalty=1.5, presence_penalty=0.5, seed=5),
    Row(repetition_penalty=1.4, top_p=0.9, seed=6),
    Row(min_tokens=10, eos_ids=[2], stop_token_ids=[4, 9], seed=7),
    Row(temperature=0.0, min_tokens=10, eos_ids=[0, 1], presence_penalty=-1.0),
]
PROMPTS = [[1 + index, 5, index] for index in range(len(MIXED))]


def mixed_table() -> SamplingTable:
    return build_table(MIXED, PROMPTS, [[]] * len(MIXED), VOCAB)


def chooser(table: SamplingTable, plan: SamplingPlan) -> Callable[[Tensor, VerifyRows], object]:
    return lambda logits, rows: choose_argmax(logits, rows, table, plan, TORCH_SAMPLE)


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("spoil", ["none", "wrong", "missing", "all"])
def test_seeded_tokens_depend_on_no_draft(num_drafts: int, spoil: str) -> None:
    """V6: requests of every kind, drafts right but at a moving place, k from 1 to 7.

    Oracle: plain sampling, one token a step. Every number of accepted drafts occurs.
    """
    target, pending = random_target(VOCAB, 2.0, 1), torch.tensor([p[-1] for p in PROMPTS])
    room = ROOM + num_drafts
    plain = run_plain(target, mixed_table(), WIDEST, pending, room)
    table = mixed_table()
    loop, seen, step = VerifyLoop(target, table, pending, ROOM), set(), 0
    while not loop.is_full:
        order = torch.arange(num_drafts)
        places = (loop.counts[:, None] + order).clamp(max=room - 1)
        drafts = plain.gather(1, places)
        is_spoilt = order == ((step + torch.arange(len(MIXED))) % (num_drafts + 1))[:, None]
        if spoil == "wrong":
            drafts = torch.where(is_spoilt, (drafts + 1) % VOCAB, drafts)
        elif spoil == "missing":
            drafts = torch.where(is_spoilt, NO_DRAFT, drafts)
        elif spoil == "all":
            drafts = (drafts + 1 + order) % VOCAB
        choice = loop.step(drafts, chooser(table, WIDEST))
        seen |= set(choice.num_committed.tolist())
        step += 1
    assert torch.equal(loop.outputs, plain[:, :ROOM])
    if spoil in ("wrong", "missing"):
        assert seen == set(range(1, num_drafts + 2))
    if spoil == "none":
        assert num_drafts + 1 in seen


def test_penalties_see_the_drafts_before_a_row() -> None:
    """V6, C-E3: drafts repeat one token that is less likely each time. Oracle: lists of tokens.

    What was rejected is not counted in the next step.
    """
    logits = [3.0, 2.25, 1.0, 0.0]
    row = Row(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    table = build_table([row], [[1]], [[]], len(logits))
    target = torch.tensor([logits] * 4)
    loop = VerifyLoop(target, table, torch.tensor([1]), 12)
    output: list[int] = []
    num_accepted = []
    while not loop.is_full:
        choice = loop.step(torch.zeros(1, 5, dtype=torch.int64), chooser(table, WIDEST))
        for index, token_id in enumerate(choice.sampled.token_ids.tolist()):
            adjusted = adjust(logits, row, [1], output + [0] * index)
            assert token_id == adjusted.index(max(adjusted))
        num_committed = int(choice.num_committed)
        output += choice.sampled.token_ids[:num_committed].tolist()
        num_accepted.append(num_committed - 1)
        counts = [output.count(token_id) for token_id in range(4)]
        assert table.output_counts[1].tolist() == counts
    assert 0 < max(num_accepted) < 5 and len(set(output)) > 2


def test_min_tokens_hides_stops_for_exactly_that_long() -> None:
    """C-E3: EOS is likeliest everywhere, in runs of accepted drafts too. Oracle: its index, 10."""
    row = Row(temperature=0.0, min_tokens=10, eos_ids=[0])
    table = build_table([row], [[1]], [[]], 4)
    loop = VerifyLoop(torch.tensor([[9.0, 1.0, 5.0, 0.0]] * 4), table, torch.tensor([1]), 14)
    while not loop.is_full:
        loop.step(torch.full((1, 3), 2), chooser(table, WIDEST))
    assert loop.outputs[0, :10].tolist() == [2] * 10
    assert loop.outputs[0, 10:].tolist() == [0] * 4


STOP_IDS = st.lists(st.integers(0, 3), max_size=2)


@settings(deadline=None, max_examples=300)
@given(
    drafts=st.lists(st.sampled_from([NO_DRAFT, 0, 1, 2, 3]), min_size=1, max_size=7),
    wrong_at=st.integers(0, 7),
    bad_at=st.integers(0, 20),
    last=st.integers(0, 3),
    num_output=st.integers(0, 5),
    min_tokens=st.integers(0, 9),
    stop_token_ids=STOP_IDS,
    eos_ids=STOP_IDS,
    ignore_eos=st.booleans(),
)
def test_runs_end_as_commits_do(
    drafts: list[int],
    wrong_at: int,
    bad_at: int,
    last: int,
    num_output: int,
    min_tokens: int,
    stop_token_ids: list[int],
    eos_ids: list[int],
    ignore_eos: bool,
) -> None:
    """C-P1, C-S5: EOS, stop tokens, min_tokens and bad rows at every offset.

    Oracle: the engine's commit of one token after another, as long as drafts are right.
    """
    params = SamplingParams(
        min_tokens=min_tokens, max_tokens=None, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
    )
    chosen = [max(draft, 0) for draft in drafts] + [last]
    if wrong_at < len(drafts):
        chosen[wrong_at] = (chosen[wrong_at] + 1) % 4
    is_bad = [index == bad_at for index in range(len(chosen))]
    request = NewRequest(request_id="r", prompt_token_ids=[1], params=params)
    state = RequestState(request, seed=0, output_text=None, output_token_ids=[3] * num_output)
    result = StepResult(chosen, is_bad, None, None, [])
    num_committed = 0
    while num_committed < len(chosen) and state.finish_reason is None:
        commit_token(state, result, num_committed, eos_ids, 1000)
        num_committed += 1
        if drafts[num_committed - 1 : num_committed] != chosen[num_committed - 1 : num_committed]:
            break

    table = SamplingTable(2, 4, CPU)
    for slot in (1, 2):
        table.set_row(
            slot,
            params if slot == 2 else SamplingParams(),
            seed=0,
            eos_ids=eos_ids if slot == 2 else [],
            prompt_token_ids=[],
            output_token_ids=[],
        )
    token_ids = torch.tensor([[1, *drafts], [1, *chosen[:-1]]])
    slots = torch.tensor([[2], [1]]).expand(2, len(chosen)).flatten()
    indexes = (num_output + torch.arange(len(chosen))).repeat(2)
    sampled = Sampled(
        torch.tensor(chosen * 2), torch.tensor(is_bad + [False] * len(chosen)), None, None, None
    )
    counted = accept_argmax(sampled, VerifyRows(token_ids, slots, indexes), table)
    assert counted.tolist() == [num_committed, len(chosen)]


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_poisoned_row_ends_the_run(offset: int) -> None:
    """C-P1: NaN in one row of a request. Oracle: the rows before it, and those of its neighbour."""
    target = random_target(VOCAB, 2.0, 2)
    table = build_table([Row(temperature=0.0)] * 2, [[1], [2]], [[], []], VOCAB)
    pending = torch.tensor([1, 2])
    drafts = run_plain(target, table, WIDEST, pending, 3)
    token_ids = torch.cat([pending[:, None], drafts], 1)
    logits = target[token_ids].flatten(0, 1)
    logits[offset, 5] = torch.nan
    # A bad row's token is 0: a draft of it must not be accepted.
    token_ids[0, offset + 1 :] = 0
    rows = VerifyRows(token_ids, torch.tensor([1] * 4 + [2] * 4), torch.arange(4).repeat(2))
    uniform = torch.full((2, 3, VOCAB), 1 / VOCAB)
    for plan in (WIDEST, BAREST, dataclasses.replace(BAREST, is_all_greedy=True)):
        for choice in (
            choose_argmax(logits, rows, table, plan, TORCH_SAMPLE),
            choose_sampled(logits, rows, table, plan, TORCH_SAMPLE, uniform),
        ):
            assert choice.num_committed.tolist() == [offset + 1, 4]
            assert choice.sampled.is_bad.nonzero().flatten().tolist() == [offset]


@pytest.mark.parametrize(
    ("num_drafts", "mean", "acceptance"),
    [(1, 1.4, 0.4), (2, 2.44, 0.8), (3, 1.875, 0.5), (3, 4.0, 1.0), (3, 1.0, 0.0)],
)
def test_synthetic_acceptance_has_its_mean(num_drafts: int, mean: float, acceptance: float) -> None:
    """Issue 5, item 8: 20k requests. Oracle: chi-square against independent acceptance, whose
    mean is the sum of its powers; tokens are those of plain sampling.
    """
    table = table_of_copies(Row(seed=50), [1], 20_000, 8)
    token_ids = torch.full((20_000, num_drafts + 1), 7)
    token_ids[:10_000, 1:] = 3
    rows = VerifyRows(
        token_ids,
        torch.arange(1, 20_001).repeat_interleave(num_drafts + 1),
        torch.arange(num_drafts + 1).repeat(20_000),
    )
    logits = random_target(8, 1.0, 3)[:1].expand(len(rows.slots), -1)
    choice = choose_synthetic(logits, rows, table, BAREST, TORCH_SAMPLE, mean)
    expected = choose_argmax(logits, rows, table, BAREST, TORCH_SAMPLE).sampled
    assert torch.equal(choice.sampled.token_ids, expected.token_ids)
    shares = [acceptance**n * (1 - acceptance) for n in range(num_drafts)]
    counts = torch.bincount(choice.num_committed - 1, minlength=num_drafts + 1)
    assert chi_square_p(counts.tolist(), [*shares, acceptance**num_drafts]) > MIN_P_VALUE


def test_synthetic_acceptance_keeps_the_cuts() -> None:
    """Issue 5, item 8: Oracle: missing drafts are not accepted; EOS and bad rows end the run."""
    table = build_table([Row(temperature=0.0, eos_ids=[1])] * 4, [[]] * 4, [[]] * 4, 4)
    token_ids = torch.full((4, 4), 2)
    token_ids[1, 2] = NO_DRAFT
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).repeat(16, 1)
    logits[8 + 2, 1] = 9.0
    logits[12 + 1, 1] = torch.nan
    rows = VerifyRows(token_ids, torch.arange(1, 5).repeat_interleave(4), torch.arange(4).repeat(4))
    choice = choose_synthetic(logits, rows, table, WIDEST, TORCH_SAMPLE, 4.0)
    assert choice.num_committed.tolist() == [4, 2, 3, 2]


def test_compiled_steps_choose_the_same() -> None:
    """Issue 5, item 3: what the CPU compiles, in one graph without breaks; penalties too.

    Oracle: the eager functions.
    """
    plan = dataclasses.replace(BAREST, is_all_greedy=True, has_penalties=True)
    target, pending = random_target(VOCAB, 2.0, 1), torch.tensor([p[-1] for p in PROMPTS])
    table = mixed_table()
    order = torch.arange(1, 4)
    drafts = run_plain(target, mixed_table(), plan, pending, 3)
    drafts = torch.where(torch.arange(len(MIXED))[:, None] % 4 == order, NO_DRAFT, drafts)
    token_ids = torch.cat([pending[:, None], drafts], 1)
    slots = torch.arange(1, 1 + len(MIXED)).repeat_interleave(4)
    rows = VerifyRows(token_ids, slots, torch.arange(4).repeat(len(MIXED)))
    logits = target[token_ids.clamp(min=0)].flatten(0, 1)

    def choose(logits: Tensor, rows: VerifyRows, table: SamplingTable) -> VerifyChoice:
        return choose_argmax(logits, rows, table, plan, TORCH_SAMPLE)

    expected = choose(logits, rows, table)
    actual = torch.compile(choose, fullgraph=True)(logits, rows, table)
    assert torch.equal(actual.num_committed, expected.num_committed)
    assert torch.equal(actual.sampled.token_ids, expected.sampled.token_ids)
    assert torch.equal(actual.sampled.is_bad, expected.sampled.is_bad)
    assert expected.num_committed.unique().tolist() == [1, 2, 3, 4]
