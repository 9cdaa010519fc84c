"""Scheduling policy and accounting, driven by results that a plain function makes up."""

from __future__ import annotations

import math

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

from engine.batch import Batch, StepResult
from engine.cache.allocator import IndexAllocator
from engine.request import FinishReason, NewRequest, RequestUpdate, SamplingParams
from engine.request_state import RequestState
from engine.scheduler import Scheduler, SchedulerLimits
from graphs.inputs import Kind

EOS = 0
PAGE_SIZE = 4


def token_at(request_id: str, position: int) -> int:
    """The oracle's token: a fixed function, so that no schedule may change an output."""
    return (sum(request_id.encode()) * 31 + position * position * 7 + 3) % 11


def expected_output(request: NewRequest, max_request_tokens: int) -> list[int]:
    """What a request must produce when nothing disturbs it."""
    tokens: list[int] = []
    while True:
        tokens.append(token_at(request.request_id, len(tokens)))
        is_eos = tokens[-1] == EOS and not request.params.ignore_eos
        if is_eos or len(tokens) == request.params.max_tokens:
            return tokens
        if len(request.prompt_token_ids) + len(tokens) >= max_request_tokens:
            return tokens


def run_step(batch: Batch) -> StepResult:
    """The oracle's result of a step."""
    tokens = [
        token_at(entry.state.request_id, len(entry.state.output_token_ids))
        for entry in batch.sampling_entries
    ]
    return StepResult(tokens, [False] * len(tokens), None, None, [])


def make_scheduler(
    num_pages: int, num_slots: int, *, max_running: int = 8, max_prefill: int = 6
) -> Scheduler:
    limits = SchedulerLimits(
        max_running_requests=max_running,
        max_queued_requests=64,
        max_prefill_tokens=max_prefill,
        max_request_tokens=num_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
    )
    return Scheduler(
        limits, IndexAllocator("pages", num_pages), IndexAllocator("slots", num_slots), [EOS]
    )


def make_state(
    request_id: str, num_prompt: int, max_tokens: int, *, ignore_eos: bool = False
) -> RequestState:
    request = NewRequest(
        request_id=request_id,
        prompt_token_ids=list(range(1, 1 + num_prompt)),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )
    return RequestState(request=request, seed=0, output_text=None)


def finish_all(scheduler: Scheduler) -> dict[str, list[int]]:
    """Step until nothing is left; every request's tokens."""
    outputs: dict[str, list[int]] = {}
    for _ in range(10_000):
        batch = scheduler.next_batch()
        if batch is None:
            return outputs
        for update in scheduler.drain(batch, run_step(batch)):
            outputs.setdefault(update.request_id, []).extend(update.token_ids)
        scheduler.check_integrity()
    raise AssertionError("the scheduler does not come to an end")


class SchedulerMachine(RuleBasedStateMachine):
    """E2, S4: submit, step, abort, finish and preempt in any order.

    Oracle: `expected_output` per request, and the accounting of `check_integrity`.
    """

    @initialize(num_pages=st.integers(4, 12), num_slots=st.integers(1, 4), budget=st.integers(1, 9))
    def start(self, num_pages: int, num_slots: int, budget: int) -> None:
        self.scheduler = make_scheduler(num_pages, num_slots, max_prefill=budget)
        self.num_pages, self.num_slots, self.budget = num_pages, num_slots, budget
        self.requests: dict[str, NewRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.in_flight: Batch | None = None
        self.steps_without: dict[str, int] = {}

    @rule(data=st.data(), max_tokens=st.integers(0, 20))
    def submit(self, data: st.DataObject, max_tokens: int) -> None:
        num_prompt = data.draw(st.integers(1, self.num_pages * PAGE_SIZE - 1))
        state = make_state(f"r{len(self.requests)}", num_prompt, max_tokens)
        self.scheduler.submit(state)
        self.requests[state.request_id] = state.request
        self.outputs[state.request_id] = []

    @rule(data=st.data())
    @precondition(lambda self: bool(self.requests))
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.abort(request_id)
        if request_id not in self.finished:
            self.aborted.add(request_id)

    @rule()
    def launch(self) -> None:
        if self.in_flight is not None:
            return
        self.record(self.scheduler.release_aborted())
        self.in_flight = self.scheduler.next_batch()
        if self.in_flight is None:
            assert len(self.finished) == len(self.requests), "work is left and nothing runs"
            return
        self.check_batch(self.in_flight)

    @rule()
    def land(self) -> None:
        if self.in_flight is None:
            return
        batch, self.in_flight = self.in_flight, None
        self.record(self.scheduler.drain(batch, run_step(batch)))

    @rule()
    def sweep(self) -> None:
        """An abort may be handled while a step is in flight, never for a request in it."""
        self.record(self.scheduler.release_aborted())

    def record(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id not in self.finished, "an update after the last one"
            self.outputs[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.finished[update.request_id] = update.finish_reason

    def check_batch(self, batch: Batch) -> None:
        slots = [entry.slot for entry in batch.entries]
        assert len(set(slots)) == len(slots) and 0 not in slots
        for entry in batch.entries:
            assert entry.start == entry.state.num_computed
            assert len(entry.state.pages) * PAGE_SIZE >= entry.start + entry.num_rows
            assert batch.kind is Kind.PREFILL or entry.num_rows == 1
        if batch.kind is Kind.PREFILL:
            assert batch.num_rows <= self.budget

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.land()
        for _ in range(5_000):
            self.launch()
            if self.in_flight is None:
                break
            self.land()
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.scheduler.num_pages_used == self.scheduler.num_slots_used == 0
        for request_id, request in self.requests.items():
            output = self.outputs[request_id]
            max_tokens = request.params.max_tokens
            expected = (
                []
                if max_tokens == 0
                else expected_output(request, self.scheduler.limits.max_request_tokens)
            )
            if self.finished[request_id] is FinishReason.ABORT:
                assert request_id in self.aborted
                assert output == expected[: len(output)]
            else:
                assert output == expected
                is_eos = bool(output) and output[-1] == EOS
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                assert self.finished[request_id] is reason


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_decodes_never_wait_for_more_than_one_prefill_step() -> None:
    """E2: a long prompt beside a running request. Oracle: the sequence of step kinds."""
    scheduler = make_scheduler(num_pages=40, num_slots=4)
    scheduler.submit(make_state("short", 2, 30, ignore_eos=True))
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.drain(batch, run_step(batch))
    scheduler.submit(make_state("long", 60, 4))
    kinds = []
    while scheduler.num_running + scheduler.num_waiting == 2:
        batch = scheduler.next_batch()
        assert batch is not None
        kinds.append(batch.kind)
        scheduler.drain(batch, run_step(batch))
    first = kinds.index(Kind.PREFILL)
    assert kinds[first : first + 6] == [Kind.PREFILL, Kind.DECODE] * 3


def test_preempted_requests_lose_no_token() -> None:
    """E2: more growth than pages. Oracle: `expected_output`, for each request alone."""
    scheduler = make_scheduler(num_pages=7, num_slots=4)
    states = [make_state(f"p{index}", 5, 14) for index in range(4)]
    for state in states:
        scheduler.submit(state)
    outputs = finish_all(scheduler)
    assert scheduler.num_preemptions > 0
    for state in states:
        assert outputs[state.request_id] == expected_output(state.request, 28)


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    """E2: first come, first served also after a preemption. Oracle: the next admission."""
    scheduler = make_scheduler(num_pages=4, num_slots=2, max_prefill=16)
    for name in ("old", "young", "waiting"):
        scheduler.submit(make_state(name, 5, 9, ignore_eos=True))
    admitted = []
    while scheduler.has_work:
        batch = scheduler.next_batch()
        assert batch is not None
        admitted += [state.request_id for state in batch.admitted]
        scheduler.drain(batch, run_step(batch))
    assert admitted == ["old", "young", "young", "waiting"]


def test_the_first_update_tells_the_time_in_the_queue() -> None:
    """S2: once, and not for a request that never left it. Oracle: the submission order."""
    scheduler = make_scheduler(num_pages=10, num_slots=1)
    for name in ("first", "never"):
        scheduler.submit(make_state(name, 3, 3, ignore_eos=True))
    updates = []
    for _ in range(2):
        batch = scheduler.next_batch()
        assert batch is not None
        updates += scheduler.drain(batch, run_step(batch))
    scheduler.abort("never")
    (ended,) = scheduler.release_aborted()
    assert updates[0].queue_s is not None and updates[0].queue_s >= 0
    assert updates[1].queue_s is None and ended.queue_s is None


def test_requests_start_in_the_order_they_came() -> None:
    """E2: one slot only. Oracle: the order of submission."""
    scheduler = make_scheduler(num_pages=10, num_slots=1)
    for index in range(5):
        scheduler.submit(make_state(f"q{index}", 3, 2))
    assert list(finish_all(scheduler)) == [f"q{index}" for index in range(5)]


def test_abort_of_a_request_in_flight_waits_for_its_step() -> None:
    """S4: its pages may not change owner while a step writes to them."""
    scheduler = make_scheduler(num_pages=10, num_slots=2)
    state = make_state("a", 3, 8)
    scheduler.submit(state)
    batch = scheduler.next_batch()
    assert batch is not None
    scheduler.abort("a")
    assert scheduler.release_aborted() == []
    assert scheduler.num_pages_used > 0
    (update,) = scheduler.drain(batch, run_step(batch))
    assert update.finish_reason is FinishReason.ABORT
    assert update.token_ids == []
    assert scheduler.num_pages_used == scheduler.num_slots_used == 0


def test_a_bad_row_ends_its_request_alone() -> None:
    """S4: NaN logits in one row. Oracle: the other request's expected output."""
    scheduler = make_scheduler(num_pages=10, num_slots=2)
    good, bad = make_state("good", 3, 5, ignore_eos=True), make_state("bad", 3, 5)
    scheduler.submit(good)
    scheduler.submit(bad)
    batch = scheduler.next_batch()
    assert batch is not None
    result = run_step(batch)
    updates = scheduler.drain(batch, StepResult(result.token_ids, [False, True], None, None, []))
    by_id = {update.request_id: update for update in updates}
    assert by_id["bad"].finish_reason is FinishReason.ERROR
    assert by_id["bad"].error and not by_id["bad"].is_user_error
    outputs = finish_all(scheduler)
    assert by_id["good"].token_ids + outputs["good"] == expected_output(good.request, 40)


def test_prompt_scores_that_are_no_numbers_end_the_request() -> None:
    """E4, S4: a NaN score may not pass as success. Oracle: FinishReason.ERROR."""
    scheduler = make_scheduler(num_pages=10, num_slots=2)
    request = NewRequest(
        request_id="nan",
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=0, prompt_logprobs=0),
    )
    scheduler.submit(RequestState(request=request, seed=0, output_text=None))
    batch = scheduler.next_batch()
    assert batch is not None and batch.entries[0].num_scored == 2
    result = StepResult([], [], None, None, [[(-1.5, []), (math.nan, [])]])
    (update,) = scheduler.drain(batch, result)
    assert update.finish_reason is FinishReason.ERROR
    assert scheduler.num_pages_used == 0


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
