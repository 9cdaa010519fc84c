"""Steps planned while others are in flight: what is known early, late, and never lost."""

from __future__ import annotations

from random import Random

import pytest

from engine.request import FinishReason, SamplingParams
from graphs.inputs import Kind
from tests.engine.device_model import (
    EOS,
    LETTERS,
    Faults,
    ScheduledRun,
    make_scheduler,
    token_at,
)

NUM_REQUESTS = 500
LONG = SamplingParams(max_tokens=50, ignore_eos=True)


def overlapped(num_pages: int = 20, num_slots: int = 4, max_prefill: int = 6) -> ScheduledRun:
    scheduler = make_scheduler(num_pages, num_slots, max_prefill=max_prefill, max_steps_in_flight=2)
    return ScheduledRun(scheduler)


def name_whose_token(index: int, token_id: int) -> str:
    """A request id for which the device first chooses `token_id` at `index`."""
    for name in (f"n{number}" for number in range(1000)):
        tokens = [token_at(name, before) for before in range(index + 1)]
        if tokens[index] == token_id and token_id not in tokens[:index]:
            return name
    raise AssertionError("no such name")


def mixed_params(random: Random, index: int) -> SamplingParams:
    max_tokens = random.choice([None, 0, 1, 2, index % 23])
    stops: list[list[str]] = [[], [], random.sample(LETTERS, 1), random.sample(LETTERS, 2)]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(random.choice([0, 0, index % 5]), 30 if max_tokens is None else max_tokens),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.sample(range(1, 11), random.choice([0, 0, 1])),
        stop=random.choice(stops),
        logprobs=random.choice([None, 0, 2]),
        prompt_logprobs=random.choice([None, None, 0, 2]),
    )


def run_trace(max_steps_in_flight: int) -> ScheduledRun:
    """Requests that arrive while others run, in a pool too small for them."""
    random = Random(0)
    run = ScheduledRun(
        make_scheduler(14, 5, max_queued=NUM_REQUESTS, max_steps_in_flight=max_steps_in_flight)
    )
    for index in range(NUM_REQUESTS):
        faults = Faults(bad_index=index % 7) if index % 31 == 0 else Faults()
        num_prompt = random.randint(1, 30)
        run.submit(f"m{index}", num_prompt, mixed_params(random, index), faults)
        for _ in range(random.choice([0, 1, 4])):
            run.launch()
            run.launch()
            run.land()
    run.finish()
    return run


def test_overlap_changes_no_token_usage_or_finish_reason() -> None:
    """E5: 500 mixed requests, stops at every position. Oracle: the same trace without overlap."""
    apart, overlapping = run_trace(1), run_trace(2)
    assert apart.scheduler.num_preemptions > 0 and overlapping.scheduler.num_preemptions > 0
    assert overlapping.device.num_decode_rows > apart.device.num_decode_rows
    stops = set()
    for one, other in zip(apart.records, overlapping.records, strict=True):
        assert one.outcome == other.outcome
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs
        if one.outcome.finish_reason is FinishReason.STOP:
            stops.add(len(one.token_ids))
    assert stops >= set(range(1, 10))


def test_a_step_is_planned_on_tokens_in_flight() -> None:
    """E5: prompt chunks and decode rows follow each other undrained. Oracle: by hand."""
    run = overlapped()
    run.submit("a", 8, LONG)
    planned = []
    for _ in range(4):
        batch = run.launch()
        assert batch is not None
        (entry,) = batch.entries
        planned.append((batch.kind, entry.start, entry.num_rows, entry.samples, entry.output_index))
        if len(planned) > 1:
            run.land()
    assert planned == [
        (Kind.PREFILL, 0, 6, False, 0),
        (Kind.PREFILL, 6, 2, True, 0),
        (Kind.DECODE, 8, 1, True, 1),
        (Kind.DECODE, 9, 1, True, 2),
    ]
    run.finish()


def test_a_stop_by_length_costs_no_row() -> None:
    """E5: max_tokens and the window are foreseen. Oracle: a row for each token but the first."""
    run = overlapped()
    for max_tokens in (0, 1, 2, 3, 9):
        run.submit(f"t{max_tokens}", 5, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    run.submit("window", 75, SamplingParams(max_tokens=None, ignore_eos=True))
    run.finish()
    assert run.scheduler.num_preemptions == 0
    assert run.device.num_decode_rows == sum(max(len(r.token_ids) - 1, 0) for r in run.records)


@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_stop_the_state_holds_the_rows_launched(depth: int) -> None:
    """E5: the label of a snapshot. Oracle: one token less than committed, with overlap none."""
    run = ScheduledRun(make_scheduler(20, 4, max_steps_in_flight=depth))
    state = run.submit(name_whose_token(3, EOS), 5, SamplingParams()).state
    while run.open:
        run.launch()
        if depth == 2:
            run.launch()
        run.land()
    assert state.num_tokens == 5 + 4
    assert state.num_state_tokens == state.num_tokens - 2 + depth
    run.finish()
    assert state.num_computed == state.num_state_tokens


def test_an_unforeseen_stop_ends_at_once_and_leaves_a_step_later() -> None:
    """S4: the last update first, then pages and slot; the id is free. Oracle: the counters."""
    name = name_whose_token(1, EOS)
    run = overlapped()
    run.submit(name, 3, SamplingParams())
    for _ in range(2):
        run.launch()
        run.launch()
        (update,) = run.land()
    assert update.finish_reason is FinishReason.STOP and not run.open
    scheduler = run.scheduler
    assert (scheduler.num_running, scheduler.num_slots_used, scheduler.has_work) == (0, 1, True)
    assert scheduler.num_pages_used > 0
    run.submit(name, 3, SamplingParams())
    assert run.launch() is not None and scheduler.num_slots_used == 2
    assert run.land() == [] and scheduler.num_slots_used == 1
    run.finish()


def test_no_step_in_flight_is_preempted() -> None:
    """E2: a decode that lacks a page waits for the drain. Oracle: by hand, one page too few."""
    run = overlapped(num_pages=4, num_slots=2, max_prefill=16)
    for name in ("old", "young"):
        run.submit(name, 5, SamplingParams(max_tokens=9, ignore_eos=True))
    refused = 0
    while run.scheduler.num_preemptions == 0:
        is_in_flight = bool(run.flights)
        if run.launch() is None:
            refused += len(run.flights) == 1
            run.land()
        assert not (run.scheduler.num_preemptions and is_in_flight)
    assert refused > 0
    run.finish()


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_at_every_step_leaks_nothing(num_steps: int) -> None:
    """S4: with two steps in flight. Oracle: the other request's outcome and the counters."""
    run = overlapped(num_pages=12)
    run.submit("other", 5, SamplingParams(max_tokens=12))
    record = run.submit("aborted", 9, LONG)
    for _ in range(num_steps):
        run.launch()
        run.launch()
        run.land()
    run.launch()
    run.launch()
    run.scheduler.abort("aborted")
    run.note(run.scheduler.release_aborted())
    run.land()
    assert "aborted" not in run.open, "an abort ends at the next drain"
    run.finish()
    assert record.outcome.finish_reason is FinishReason.ABORT


def test_a_fault_ends_everything_that_is_in_flight() -> None:
    """S4: running, waiting and leaving requests. Oracle: the counters, one update for each."""
    run = overlapped(num_slots=2)
    stopping = name_whose_token(1, EOS)
    run.submit(stopping, 3, SamplingParams())
    for name in ("running", "waiting"):
        run.submit(name, 3, LONG)
    while stopping in run.open:
        run.launch()
        run.launch()
        run.land()
    assert run.scheduler.num_slots_used == 2 and run.flights
    updates = run.scheduler.fail_all("gone")
    assert sorted(update.request_id for update in updates) == ["running", "waiting"]
    assert all(update.finish_reason is FinishReason.ERROR for update in updates)
    run.scheduler.check_integrity()
    assert not run.scheduler.has_work
    assert run.scheduler.num_pages_used == run.scheduler.num_slots_used == 0
