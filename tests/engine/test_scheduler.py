"""Scheduling policy and accounting, driven by a model of the device."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.cache.allocator import IndexAllocator
from engine.request import FinishReason, SamplingParams
from graphs.inputs import Kind
from tests.engine.device_model import LETTERS, Faults, ScheduledRun, make_scheduler

NAMES = [f"r{index}" for index in range(12)]
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.integers(0, 2), st.integers(0, 20), st.none()),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(1, 10), max_size=1),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=2), max_size=2),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.integers(0, 3),
)
FAULTS = st.just(Faults()) | st.builds(
    Faults, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)
)


def params(max_tokens: int, *, ignore_eos: bool = False) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)


class SchedulerMachine(RuleBasedStateMachine):
    """E2, E5, S4: submit, launch, drain, abort, finish and preempt in any order and overlap.

    Oracle: `expected_outcome` per request, the row checks of `DeviceModel`, and the
    accounting of `check_integrity`. Depths 1 and more have one oracle, so they agree.
    """

    @initialize(
        num_pages=st.integers(3, 12),
        num_slots=st.integers(1, 4),
        budget=st.integers(1, 9),
        max_running=st.integers(1, 5),
        depth=st.integers(1, 3),
    )
    def start(
        self, num_pages: int, num_slots: int, budget: int, max_running: int, depth: int
    ) -> None:
        scheduler = make_scheduler(
            num_pages,
            num_slots,
            max_running=max_running,
            max_prefill=budget,
            max_steps_in_flight=depth,
        )
        self.run = ScheduledRun(scheduler)

    @rule(data=st.data(), asked=PARAMS, faults=FAULTS)
    def submit(self, data: st.DataObject, asked: SamplingParams, faults: Faults) -> None:
        """An id may come again as soon as its last update is out."""
        free = [name for name in NAMES if name not in self.run.open]
        if not free:
            return
        room = 0 if asked.max_tokens == 0 else 1
        num_prompt = data.draw(st.integers(1, self.run.scheduler.limits.max_request_tokens - room))
        self.run.submit(free[0], num_prompt, asked, faults)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.run.open))
    def abort(self, data: st.DataObject) -> None:
        self.run.scheduler.abort(data.draw(st.sampled_from(sorted(self.run.open))))

    @rule()
    def launch(self) -> None:
        self.run.launch()

    @rule()
    def land(self) -> None:
        self.run.land()

    @rule()
    def turn(self) -> None:
        """Fill up and drain one step, as the engine does."""
        while self.run.launch() is not None:
            pass
        self.run.land()

    @rule()
    def sweep(self) -> None:
        """An abort may be handled while a step is in flight, never for a request in it."""
        self.run.note(self.run.scheduler.release_aborted())

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "run"):
            self.run.scheduler.check_integrity()
            assert self.run.scheduler.num_running <= self.run.scheduler.limits.max_running_requests

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_decodes_never_wait_for_more_than_one_prefill_step() -> None:
    """E2: a long prompt beside a running request. Oracle: the sequence of step kinds."""
    run = ScheduledRun(make_scheduler(num_pages=40, num_slots=4))
    run.submit("short", 2, params(30, ignore_eos=True))
    run.launch()
    run.land()
    run.submit("long", 60, params(4))
    kinds = []
    while len(run.open) == 2:
        batch = run.launch()
        assert batch is not None
        kinds.append(batch.kind)
        run.land()
    first = kinds.index(Kind.PREFILL)
    assert kinds[first : first + 6] == [Kind.PREFILL, Kind.DECODE] * 3


def test_preempted_requests_lose_no_token() -> None:
    """E2: more growth than pages. Oracle: `expected_outcome`, for each request alone."""
    run = ScheduledRun(make_scheduler(num_pages=7, num_slots=4))
    for index in range(4):
        run.submit(f"p{index}", 5, params(14))
    run.finish()
    assert run.scheduler.num_preemptions > 0


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    """E2: first come, first served also after a preemption. Oracle: the next admission."""
    run = ScheduledRun(make_scheduler(num_pages=4, num_slots=2, max_prefill=16))
    for name in ("old", "young", "waiting"):
        run.submit(name, 5, params(9, ignore_eos=True))
    admitted = []
    while run.open:
        batch = run.launch()
        assert batch is not None
        admitted += [state.request_id for state in batch.admitted]
        run.land()
    assert admitted == ["old", "young", "young", "waiting"]


def test_the_first_update_tells_the_time_in_the_queue() -> None:
    """S2: once, and not for a request that never left it. Oracle: the submission order."""
    run = ScheduledRun(make_scheduler(num_pages=10, num_slots=1))
    for name in ("first", "never"):
        run.submit(name, 3, params(3, ignore_eos=True))
    updates = []
    for _ in range(2):
        run.launch()
        updates += run.land()
    run.scheduler.abort("never")
    (ended,) = run.scheduler.release_aborted()
    assert updates[0].queue_s is not None and updates[0].queue_s >= 0
    assert updates[1].queue_s is None and ended.queue_s is None


def test_requests_start_in_the_order_they_came() -> None:
    """E2: one slot only. Oracle: the order of submission."""
    run = ScheduledRun(make_scheduler(num_pages=10, num_slots=1))
    names = [f"q{index}" for index in range(5)]
    for name in names:
        run.submit(name, 3, params(2))
    started: list[str] = []
    while run.open:
        batch = run.launch()
        assert batch is not None
        started += [state.request_id for state in batch.admitted]
        run.land()
    assert started == names


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_a_request_in_flight_waits_for_its_step(depth: int) -> None:
    """S4: its pages may not change owner while a step writes to them; no other step does.

    Bad scores in that step are no second end. Oracle: one update, the counters.
    """
    run = ScheduledRun(make_scheduler(num_pages=10, num_slots=2, max_steps_in_flight=depth))
    asked = SamplingParams(max_tokens=8, prompt_logprobs=0)
    run.submit("a", 3, asked, Faults(bad_score_row=1))
    run.launch()
    run.scheduler.abort("a")
    assert run.scheduler.release_aborted() == []
    assert run.launch() is None
    assert run.scheduler.num_pages_used > 0
    (update,) = run.land()
    assert update.finish_reason is FinishReason.ABORT
    assert update.token_ids == []
    assert run.scheduler.num_pages_used == run.scheduler.num_slots_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_bad_row_ends_its_request_alone(depth: int) -> None:
    """S4: NaN logits in one row. Oracle: `expected_outcome` of the other request."""
    run = ScheduledRun(make_scheduler(num_pages=10, num_slots=2, max_steps_in_flight=depth))
    run.submit("good", 3, params(5, ignore_eos=True))
    bad = run.submit("bad", 3, params(5), Faults(bad_index=0))
    run.finish()
    assert bad.last is not None and bad.last.finish_reason is FinishReason.ERROR
    assert bad.last.error and not bad.last.is_user_error


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_scores_that_are_no_numbers_end_the_request(depth: int) -> None:
    """E4, S4: a NaN score may not pass as success. Oracle: FinishReason.ERROR.

    With overlap its second chunk is in flight when the first one ends the request, and the
    scores of the request beside it there are still its own.
    """
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scheduler = make_scheduler(10, 2, max_prefill=3, max_steps_in_flight=depth)
    run = ScheduledRun(scheduler)
    nan = run.submit("nan", 5, asked, Faults(bad_score_row=1))
    run.submit("next", 5, asked)
    run.finish()
    assert nan.outcome.finish_reason is FinishReason.ERROR
    assert nan.prompt_logprobs is not None and len(nan.prompt_logprobs) == 2


@pytest.mark.parametrize("num_items", [1, 5])
def test_allocator_refuses_what_it_does_not_have(num_items: int) -> None:
    """E2: taking more than is free changes nothing. Oracle: counts."""
    allocator = IndexAllocator("pages", num_items)
    assert allocator.take(num_items + 1) is None
    taken = allocator.take(num_items)
    assert taken is not None and sorted(taken) == list(range(1, num_items + 1))
    assert allocator.take(1) is None
    allocator.give_back(taken[:1])
    with pytest.raises(AssertionError, match="twice"):
        allocator.give_back(taken[:1])
    allocator.check_integrity(taken[1:])
