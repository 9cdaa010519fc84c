"""A device and a caller in plain Python: what a scheduler's steps would do, row by row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from engine.batch import Batch, BatchEntry, StepResult
from engine.cache.allocator import IndexAllocator
from engine.output_text import OutputText
from engine.request import FinishReason, NewRequest, RequestUpdate, SamplingParams, TokenLogprob
from engine.request_state import RequestState
from engine.scheduler import Scheduler
from engine.scheduler_limits import SchedulerLimits
from graphs.inputs import Kind

EOS = 0
PAGE_SIZE = 4
LETTERS = "abcdefghijk"
TOP = [(1, -0.5), (2, -1.5), (3, -2.5)]


def token_at(request_id: str, index: int) -> int:
    """The oracle's token: a fixed function, so that no schedule may change an output."""
    return crc32(f"{request_id} {index}".encode()) % len(LETTERS)


@dataclass(frozen=True)
class Faults:
    """The output index at which the logits are bad, the prompt row whose score is NaN."""

    bad_index: int | None = None
    bad_score_row: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a request comes to: tokens, why it ended, and what ended it."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None


def expected_outcome(request: NewRequest, max_request_tokens: int, faults: Faults) -> Outcome:
    """The plain loop over one request that nothing disturbs."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    is_scored = params.prompt_logprobs is not None
    if is_scored and faults.bad_score_row is not None and faults.bad_score_row < num_prompt - 1:
        return Outcome([], FinishReason.ERROR)
    tokens: list[int] = []
    while len(tokens) != params.max_tokens:
        if len(tokens) == faults.bad_index:
            return Outcome(tokens, FinishReason.ERROR)
        tokens.append(token_at(request.request_id, len(tokens)))
        if len(tokens) > params.min_tokens:
            if tokens[-1] == EOS and not params.ignore_eos:
                return Outcome(tokens, FinishReason.STOP)
            if tokens[-1] in params.stop_token_ids:
                return Outcome(tokens, FinishReason.STOP, tokens[-1])
            text = "".join(LETTERS[token] for token in tokens)
            for stop in params.stop_strings:
                if text.endswith(stop):
                    return Outcome(tokens, FinishReason.STOP, stop)
        if num_prompt + len(tokens) >= max_request_tokens:
            break
    return Outcome(tokens, FinishReason.LENGTH)


class LetterStream:
    """A TextStream of one letter a token."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(LETTERS[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return ""


@dataclass
class Slot:
    """The tokens in a slot's GDN state, and the token chosen last."""

    owner: RequestState
    token_ids: list[int] = field(default_factory=list)
    chosen: int | None = None


@dataclass(frozen=True)
class Flight:
    """A launched step, its result, and what each of its entries used."""

    batch: Batch
    result: StepResult
    slots: list[int]
    pages: list[list[int]]


class DeviceModel:
    """Runs steps in the order of their launch, as one stream does.

    It asserts what the kernels rely on: a state gets each row once and in order, decode rows
    follow a token that the slot has chosen, the pages hold the whole context, and no row lies
    beyond the request's length.
    """

    def __init__(self, max_request_tokens: int) -> None:
        self.max_request_tokens = max_request_tokens
        self.faults: dict[RequestState, Faults] = {}
        self.num_decode_rows = 0
        self._slots: dict[int, Slot] = {}
        self._kv: dict[int, int] = {}

    def launch(self, batch: Batch) -> Flight:
        for state in batch.admitted:
            assert state.slot is not None
            self._slots[state.slot] = Slot(state)
        chosen = [self._run(batch.kind, entry) for entry in batch.entries]
        is_bad = [
            self.faults[entry.state].bad_index == entry.output_index
            for entry in batch.sampling_entries
        ]
        result = StepResult(
            token_ids=[token for token in chosen if token is not None],
            is_bad=is_bad,
            logprobs=[-float(entry.output_index) for entry in batch.sampling_entries],
            tops=[TOP for _ in batch.sampling_entries],
            scores=[
                [self._score(entry.state, row) for row in self._scored_rows(entry)]
                for entry in batch.entries
                if entry.num_scored
            ],
        )
        slots = [entry.slot for entry in batch.entries]
        assert len(set(slots)) == len(slots) and 0 not in slots
        return Flight(batch, result, slots, [list(entry.state.pages) for entry in batch.entries])

    def _run(self, kind: Kind, entry: BatchEntry) -> int | None:
        """Process an entry's rows; the token that it chooses."""
        state, slot = entry.state, self._slots[entry.slot]
        assert slot.owner is state, "a slot changed hands without an admission"
        assert entry.start == len(slot.token_ids), "rows are missing or run twice"
        stop = entry.start + entry.num_rows
        if kind is Kind.DECODE:
            assert entry.num_rows == 1 and entry.samples and entry.num_scored == 0
            assert slot.chosen is not None, "a decode row without a token"
            rows = [slot.chosen]
            self.num_decode_rows += 1
        else:
            rows = state.tokens_between(entry.start, stop)
        assert len(rows) == entry.num_rows > 0
        slot.token_ids += rows
        prompt = state.request.prompt_token_ids
        assert slot.token_ids[: len(prompt)] == prompt[: len(slot.token_ids)]
        for position, token_id in enumerate(rows, start=entry.start):
            self._kv[self._kv_slot(state, position)] = token_id
        context = [self._kv[self._kv_slot(state, position)] for position in range(stop)]
        assert context == slot.token_ids
        slot.chosen = None
        if entry.samples:
            assert entry.output_index == stop - state.num_prompt
            assert entry.output_index != state.params.max_tokens, "a row beyond max_tokens"
            assert state.num_prompt + entry.output_index < self.max_request_tokens
            slot.chosen = token_at(state.request_id, entry.output_index)
        return slot.chosen

    def _kv_slot(self, state: RequestState, position: int) -> int:
        return state.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def _scored_rows(self, entry: BatchEntry) -> range:
        return range(entry.start, entry.start + entry.num_scored)

    def _score(self, state: RequestState, row: int) -> tuple[float, list[tuple[int, float]]]:
        return math.nan if row == self.faults[state].bad_score_row else -1.0 - row, TOP


@dataclass
class Record:
    """One submitted request and all that its updates have told."""

    state: RequestState
    faults: Faults
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    last: RequestUpdate | None = None

    @property
    def outcome(self) -> Outcome:
        assert self.last is not None and self.last.finish_reason is not None
        return Outcome(self.token_ids, self.last.finish_reason, self.last.stop_reason)

    def check(self, max_request_tokens: int) -> None:
        """Assert the outcome of the plain loop, or its beginning after an abort."""
        request, params = self.state.request, self.state.params
        expected = expected_outcome(request, max_request_tokens, self.faults)
        if self.outcome.finish_reason is FinishReason.ABORT:
            assert self.state.is_aborted
            assert self.token_ids == expected.token_ids[: len(self.token_ids)]
        else:
            assert self.outcome == expected
        assert self.state.output_token_ids == self.token_ids, "committed after the end"
        if params.logprobs is not None:
            tokens = enumerate(self.token_ids)
            top = TOP[: params.logprobs]
            assert self.logprobs == [TokenLogprob(token, -float(i), top) for i, token in tokens]
        is_whole = self.outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if params.prompt_logprobs is not None and is_whole:
            top = TOP[: params.prompt_logprobs]
            scores = enumerate(request.prompt_token_ids[1:])
            assert self.prompt_logprobs == [
                None,
                *(TokenLogprob(token, -1.0 - row, top) for row, token in scores),
            ]


class ScheduledRun:
    """A scheduler, the device that runs its steps, and the caller of its requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = DeviceModel(scheduler.limits.max_request_tokens)
        self.flights: deque[Flight] = deque()
        self.records: list[Record] = []
        self.open: dict[str, Record] = {}

    def submit(
        self, request_id: str, num_prompt: int, params: SamplingParams, faults: Faults = Faults()
    ) -> Record:
        state = make_state(request_id, num_prompt, params)
        record = Record(state, faults)
        self.device.faults[state] = faults
        self.scheduler.submit(state)
        self.records.append(record)
        self.open[request_id] = record
        return record

    def launch(self) -> Batch | None:
        """Plan and launch one step, if one may be in flight."""
        if len(self.flights) == self.scheduler.limits.max_steps_in_flight:
            return None
        self.note(self.scheduler.release_aborted())
        batch = self.scheduler.next_batch()
        if batch is not None:
            assert batch.entries
            if batch.kind is Kind.PREFILL:
                assert batch.num_rows <= self.scheduler.limits.max_prefill_tokens
            self.flights.append(self.device.launch(batch))
        else:
            assert self.flights or not self.open, "work is left and nothing runs"
        self.scheduler.check_integrity()
        return batch

    def land(self) -> list[RequestUpdate]:
        """Drain the oldest step, if there is one."""
        if not self.flights:
            return []
        flight = self.flights.popleft()
        for entry, slot, pages in zip(
            flight.batch.entries, flight.slots, flight.pages, strict=True
        ):
            assert entry.state.slot == slot, "a slot was returned in flight"
            assert entry.state.pages[: len(pages)] == pages, "a page was returned in flight"
        updates = self.scheduler.drain(flight.batch, flight.result)
        self.note(updates)
        self.scheduler.check_integrity()
        return updates

    def note(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            record = self.open[update.request_id]
            record.token_ids += update.token_ids
            record.logprobs += update.logprobs or []
            if update.prompt_logprobs is not None:
                assert record.prompt_logprobs is None
                record.prompt_logprobs = update.prompt_logprobs
            if update.finish_reason is not None:
                record.last = update
                del self.open[update.request_id]

    def finish(self) -> None:
        """Step until nothing is left, as the engine does; check every request's outcome."""
        for _ in range(20_000):
            while self.launch() is not None:
                pass
            if not self.flights:
                break
            self.land()
        assert not self.open and not self.scheduler.has_work
        assert self.scheduler.num_pages_used == self.scheduler.num_slots_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for record in self.records:
            record.check(self.scheduler.limits.max_request_tokens)
            assert record.state.num_computed == record.state.num_launched


def make_scheduler(
    num_pages: int,
    num_slots: int,
    *,
    max_running: int = 8,
    max_prefill: int = 6,
    max_queued: int = 64,
    max_steps_in_flight: int = 1,
) -> Scheduler:
    limits = SchedulerLimits(
        max_running_requests=max_running,
        max_queued_requests=max_queued,
        max_prefill_tokens=max_prefill,
        max_request_tokens=num_pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_steps_in_flight=max_steps_in_flight,
    )
    return Scheduler(
        limits, IndexAllocator("pages", num_pages), IndexAllocator("slots", num_slots), [EOS]
    )


def make_state(request_id: str, num_prompt: int, params: SamplingParams) -> RequestState:
    prompt = [1 + position % 7 for position in range(num_prompt)]
    request = NewRequest(request_id=request_id, prompt_token_ids=prompt, params=params)
    output_text = OutputText(LetterStream(), params) if params.stop_strings else None
    return RequestState(request=request, seed=0, output_text=output_text)
