"""Verify steps through the scheduler: how many rows they have, what stays, who runs when."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.cache.allocator import IndexAllocator
from engine.request import FinishReason, SamplingParams
from engine.scheduler import Scheduler
from graphs.inputs import Kind
from tests.engine.device_model import (
    EOS,
    LETTERS,
    PAGE_SIZE,
    Faults,
    ScheduledRun,
    drafts_right_up_to,
    make_scheduler,
)

NAMES = [f"v{index}" for index in range(12)]
FAULTS = st.just(Faults()) | st.builds(
    Faults, st.none() | st.integers(0, 12), st.none() | st.integers(0, 9)
)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(0, 2) | st.integers(9, 30) | st.none())
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if max_tokens in (0, 1) else draw(st.sampled_from([0, 0, 0, 2])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(1, 10), max_size=1)),
        stop=draw(st.lists(st.just("END") | st.text(LETTERS, min_size=1, max_size=2), max_size=2)),
        logprobs=draw(st.none() | st.integers(0, 3)),
        prompt_logprobs=draw(st.none() | st.integers(0, 3)),
    )


def long_params(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2)


def verify_run(num_drafts: int, num_pages: int = 60, max_prefill: int = 16) -> ScheduledRun:
    scheduler = make_scheduler(
        num_pages, num_slots=8, max_prefill=max_prefill, max_queued=500, num_drafts=num_drafts
    )
    return ScheduledRun(scheduler)


class VerifyMachine(RuleBasedStateMachine):
    """C-L2: submit, abort, launch, drain, finish and preempt in any order, for every k.

    Oracle: `expected_outcome` per request, the row checks of `DeviceModel`, the accounting of
    `check_integrity` after each operation, the pages of the known tokens after each verify step.
    """

    @initialize(
        num_drafts=st.integers(1, 7),
        num_pages=st.integers(3, 14),
        num_slots=st.integers(1, 4),
        budget=st.integers(1, 9),
    )
    def start(self, num_drafts: int, num_pages: int, num_slots: int, budget: int) -> None:
        self.run = ScheduledRun(
            make_scheduler(num_pages, num_slots, max_prefill=budget, num_drafts=num_drafts)
        )

    @rule(data=st.data(), asked=any_params(), faults=FAULTS)
    def submit(self, data: st.DataObject, asked: SamplingParams, faults: Faults) -> None:
        free = [name for name in NAMES if name not in self.run.open]
        if free:
            longest = self.run.scheduler.limits.max_request_tokens - (asked.max_tokens != 0)
            self.run.submit(free[0], data.draw(st.integers(1, longest)), asked, faults)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.run.open))
    def abort(self, data: st.DataObject) -> None:
        self.run.scheduler.abort(data.draw(st.sampled_from(sorted(self.run.open))))
        self.run.scheduler.check_integrity()

    @rule()
    def sweep(self) -> None:
        self.run.note(self.run.scheduler.release_aborted())
        self.run.scheduler.check_integrity()

    @rule()
    def launch(self) -> None:
        self.run.launch()

    @rule(num_steps=st.integers(1, 4))
    def turn(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run.launch()
            self.run.land()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


VerifyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestVerifyMachine = VerifyMachine.TestCase


def run_trace(num_drafts: int) -> ScheduledRun:
    """Requests that arrive while others run, in a pool too small for them."""
    random = Random(0)
    # Room for 46 tokens of one request with every k: none ends by the window.
    num_pages = 12 + -(-num_drafts // PAGE_SIZE)
    run = verify_run(num_drafts, num_pages, max_prefill=6)
    for index in range(150):
        asked = SamplingParams(
            max_tokens=random.choice([0, 1, 2, index % 29, 25]),
            ignore_eos=random.random() < 0.5,
            stop_token_ids=random.sample(range(1, 11), index % 4 == 0),
            stop=["END", "bc"] if index % 3 == 0 else [],
            logprobs=random.choice([None, 0, 2]),
            prompt_logprobs=random.choice([None, None, 2]),
        )
        faults = Faults(bad_index=index % 7) if index % 31 == 0 else Faults()
        run.submit(f"m{index}", random.randint(1, 18), asked, faults)
        for _ in range(random.choice([0, 1, 3])):
            run.launch()
            run.land()
    run.finish()
    return run


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_drafts_change_no_output(num_drafts: int) -> None:
    """V2: 150 mixed requests, with preemptions. Oracle: the same requests without drafts."""
    plain, drafted = run_trace(0), run_trace(num_drafts)
    assert drafted.scheduler.num_preemptions > 0
    for one, other in zip(plain.records, drafted.records, strict=True):
        assert one.outcome == other.outcome
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
    assert {accepted for _, accepted in drafted.drafts_done} == set(range(num_drafts + 1))
    assert {drafted for drafted, _ in drafted.drafts_done} == set(range(num_drafts + 1))
    assert drafted.device.num_decode_rows < plain.device.num_decode_rows


@pytest.mark.parametrize("num_right", range(4))
def test_a_drain_rolls_back_what_was_not_committed(num_right: int) -> None:
    """V3: k = 3, pages of 4 tokens. Oracle: lengths and pages by hand, for each accept count."""
    run = ScheduledRun(make_scheduler(30, 1, num_drafts=3), drafts_right_up_to(num_right))
    record = run.submit("a", 5, long_params(40))
    state = record.state
    run.step()
    assert (state.num_tokens, state.num_computed, len(state.pages)) == (6, 5, 3)
    for _ in range(5):
        before = state.num_tokens
        batch = run.launch()
        assert batch is not None
        (entry,) = batch.entries
        assert (entry.start, entry.num_rows) == (before - 1, 4)
        assert state.num_launched == before + 3
        assert len(state.pages) == -(-(before + 3) // 4)
        run.land()
        assert state.num_tokens == before + num_right + 1
        assert state.num_launched == state.num_computed == state.num_tokens - 1
        assert run.scheduler.num_pages_used == len(state.pages) == -(-state.num_tokens // 4)
    run.finish()


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_short_prompt_is_prefilled(num_drafts: int, extra: int) -> None:
    """C-S1: prompts of k, k + 1 and k + 2 tokens, alone and beside a decode. Oracle: by hand."""
    run = verify_run(num_drafts)
    num_prompt = num_drafts + extra
    run.submit("alone", num_prompt, long_params(60))
    alone = run.step()
    assert (alone.kind, alone.num_rows, alone.entries[0].start) == (Kind.PREFILL, num_prompt, 0)
    assert run.step().kind is Kind.VERIFY
    run.submit("beside", num_prompt, long_params(60))
    beside = run.step()
    assert (beside.kind, beside.num_rows) == (Kind.PREFILL, num_prompt)
    assert [entry.state.request_id for entry in beside.entries] == ["beside"]
    both = run.step()
    assert both.kind is Kind.VERIFY
    assert [entry.num_rows for entry in both.entries] == [num_drafts + 1] * 2
    run.finish()


def test_a_chunk_of_as_many_rows_as_a_verify_is_a_prefill() -> None:
    """C-S1: k = 3, a prompt of three chunks of 4 beside a decode. Oracle: kinds by hand."""
    run = verify_run(3, max_prefill=4)
    run.submit("decoding", 2, long_params(60))
    run.step()
    run.submit("chunked", 12, long_params(9))
    planned = [(batch.kind, batch.num_rows) for batch in (run.step() for _ in range(6))]
    assert planned[:5] == [(Kind.VERIFY, 4), (Kind.PREFILL, 4)] * 2 + [(Kind.VERIFY, 4)]
    run.finish()


def test_all_requests_run_at_once() -> None:
    """C-L3: 8 requests, k = 3, just the slots and pages that 8 need. Oracle: by hand."""
    run = ScheduledRun(make_scheduler(24, 8, max_prefill=64, num_drafts=3))
    records = [run.submit(f"r{index}", 5, long_params(4)) for index in range(8)]
    run.step()
    assert run.scheduler.num_running == run.scheduler.num_slots_used == 8
    batch = run.step()
    assert (batch.kind, len(batch.entries), batch.num_rows) == (Kind.VERIFY, 8, 32)
    run.finish()
    assert run.scheduler.num_preemptions == 0
    assert all(len(record.token_ids) == 4 for record in records)


@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_the_longest_request_fits(num_drafts: int) -> None:
    """C-L3: the pool holds k tokens more than a request may have. Oracle: it ends by length."""
    scheduler = make_scheduler(6, 2, max_prefill=9, num_drafts=num_drafts)
    longest = scheduler.limits.max_request_tokens
    run = ScheduledRun(scheduler)
    prompts = [1, 2, longest // 2, longest - 1, longest]
    records = [
        run.submit(f"p{index}", num_prompt, long_params(0 if num_prompt == longest else None))
        for index, num_prompt in enumerate(prompts)
    ]
    run.finish()
    for record in records:
        assert record.state.num_tokens == longest
        assert record.outcome.finish_reason is FinishReason.LENGTH


class RefusingAllocator(IndexAllocator):
    """Pages of which the next one that is asked for may be refused, as if none were free."""

    is_refusing = False

    def take(self, count: int) -> list[int] | None:
        if self.is_refusing and count:
            self.is_refusing = False
            return None
        return super().take(count)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_preemption_every_five_tokens_changes_nothing(num_requests: int) -> None:
    """C-S7: pages are refused 5 tokens after an admission. Oracle: `expected_outcome`."""
    limits = make_scheduler(60, 4, max_prefill=20, num_drafts=3).limits
    pages = RefusingAllocator("pages", 60)
    run = ScheduledRun(Scheduler(limits, pages, IndexAllocator("slots", 4), [EOS]))
    records = [run.submit(f"r{index}", 4, long_params(60)) for index in range(num_requests)]
    while run.open:
        running = [r.state for r in records if r.state.slot is not None]
        if any(s.is_prefilled and s.num_tokens - s.num_prefill >= 5 for s in running):
            pages.is_refusing = True
        run.step()
    pages.is_refusing = False
    run.finish()
    assert run.scheduler.num_preemptions >= 7


def test_joins_and_leaves_change_no_output_and_no_acceptance() -> None:
    """C-S8: 200 requests that come and go at random. Oracle: each alone, its drafts included."""
    random = Random(1)
    run = verify_run(3, num_pages=200)
    for index in range(200):
        asked = SamplingParams(max_tokens=random.randint(1, 25), ignore_eos=index % 2 == 0)
        run.submit(f"j{index}", random.randint(1, 9), asked)
        if random.random() < 0.2:
            run.scheduler.abort(random.choice(sorted(run.open)))
        for _ in range(random.randint(0, 4)):
            run.launch()
            run.land()
    run.finish()
    assert run.scheduler.num_preemptions == 0
    solo_run = verify_run(3)
    num_aborted = 0
    for record in run.records:
        solo = solo_run.submit(
            record.state.request_id, record.state.num_prompt, record.state.params
        )
        solo_run.finish()
        if record.outcome.finish_reason is FinishReason.ABORT:
            num_aborted += 1
            continue
        assert record.outcome == solo.outcome
        assert record.num_drafted == solo.num_drafted
        assert record.num_accepted == solo.num_accepted
    assert 10 < num_aborted < 80


def test_the_middle_of_three_requests_leaves() -> None:
    """C-S8: they accept 0, 1 and all 3 drafts a step. Oracle: tokens of each step by hand."""
    rights = {"none": 0, "one": 1, "all": 3}
    run = ScheduledRun(
        make_scheduler(40, 3, max_prefill=16, num_drafts=3),
        lambda name, index, count: drafts_right_up_to(rights[name])(name, index, count),
    )
    records = {name: run.submit(name, 3, long_params(41)) for name in rights}
    run.step()
    counts = []
    for index in range(4):
        if index == 2:
            run.scheduler.abort("one")
        before = {name: len(record.token_ids) for name, record in records.items()}
        run.step()
        counts.append([len(records[name].token_ids) - before[name] for name in rights])
    assert counts == [[1, 2, 4], [1, 2, 4], [1, 0, 4], [1, 0, 4]]
    run.finish()


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_in_a_verify_step_waits_for_it(num_steps: int) -> None:
    """S4, V3: nothing of that step is committed. Oracle: one last update, the counters."""
    run = verify_run(3)
    record = run.submit("a", 3, long_params(100))
    run.step()
    for _ in range(num_steps):
        run.step()
    batch = run.launch()
    assert batch is not None and batch.kind is Kind.VERIFY
    before = list(record.token_ids)
    run.scheduler.abort("a")
    assert run.scheduler.release_aborted() == []
    assert run.scheduler.num_pages_used > 0 and run.scheduler.num_slots_used == 1
    (update,) = run.land()
    assert (update.finish_reason, update.token_ids) == (FinishReason.ABORT, [])
    assert record.token_ids == before
    assert run.scheduler.num_pages_used == run.scheduler.num_slots_used == 0
    run.finish()


def test_a_fault_in_a_verify_step_ends_everything() -> None:
    """S4: two running requests, one waiting. Oracle: the counters, one update for each."""
    run = ScheduledRun(make_scheduler(30, 2, num_drafts=3))
    for name in ("a", "b", "waiting"):
        run.submit(name, 3, long_params(20))
    while (batch := run.launch()) is None or batch.kind is not Kind.VERIFY:
        run.land()
    updates = run.scheduler.fail_all("gone")
    assert sorted(update.request_id for update in updates) == ["a", "b", "waiting"]
    run.scheduler.check_integrity()
    assert not run.scheduler.has_work
    assert run.scheduler.num_pages_used == run.scheduler.num_slots_used == 0


def count_preemptions(num_drafts: int) -> int:
    """Of 16 requests in too few pages, none of whose drafts is accepted."""
    scheduler = make_scheduler(80, 8, max_prefill=64, num_drafts=num_drafts)
    run = ScheduledRun(scheduler, drafts_right_up_to(0))
    asked = SamplingParams(max_tokens=60, ignore_eos=True)
    for index in range(16):
        run.submit(f"r{index}", 20, asked)
    while run.open:
        run.step()
    run.finish()
    return scheduler.num_preemptions


@pytest.mark.parametrize("num_drafts", [3, 7])
def test_rejected_drafts_cost_no_prefills(num_drafts: int) -> None:
    """V21: pages that a drain returns are wanted again by the next step, not by who waits.

    Oracle: the run without drafts.
    """
    assert count_preemptions(num_drafts) <= 1.5 * count_preemptions(0)
