"""A device and a caller in plain Python: what a scheduler's steps would do, row by row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from zlib import crc32

from engine.batch import Batch, BatchEntry, StepResult
from engine.cache.allocator import IndexAllocator
from engine.output_text import OutputText
from engine.request import FinishReason, NewRequest, RequestUpdate, SamplingParams, TokenLogprob
from engine.request_state import RequestState
from engine.scheduler import Scheduler
from engine.scheduler_limits import SchedulerLimits
from graphs.inputs import Kind
from graphs.rows import NO_DRAFT

EOS = 0
PAGE_SIZE = 4
LETTERS = "abcdefghijk"
# The text of each token. "END" comes only from the last two in turn, and not at their edges.
PIECES = [*LETTERS[:9], "jE", "NDk"]
TOP = [(1, -0.5), (2, -1.5), (3, -2.5)]
# In the KV of a row that was rolled back: no token is this one.
ROLLED_BACK = -9

DraftRule = Callable[[str, int, int], list[int]]
"""Drafts from a request id, the output index of the first one, and how many there may be."""


def token_at(request_id: str, index: int) -> int:
    """The oracle's token: a fixed function, so that no schedule may change an output."""
    return crc32(f"{request_id} {index}".encode()) % len(PIECES)


def drafts_right_up_to(num_right: int) -> DraftRule:
    """As many drafts as there may be, all but the first num_right of them wrong."""

    def draft(request_id: str, index: int, max_drafts: int) -> list[int]:
        tokens = [token_at(request_id, index + offset) for offset in range(max_drafts)]
        return tokens[:num_right] + [(token + 1) % len(PIECES) for token in tokens[num_right:]]

    return draft


def moving_drafts(request_id: str, index: int, max_drafts: int) -> list[int]:
    """Right at first, wrong from a position on that moves; in a quarter of steps fewer or none."""
    draw = crc32(f"drafts {request_id} {index}".encode())
    num_usable = draw // 1000 % (max_drafts + 1) if draw % 4 == 0 else max_drafts
    return drafts_right_up_to(draw // 7 % (max_drafts + 1))(request_id, index, num_usable)


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
            if (stop := completed_stop(tokens, params.stop_strings)) is not None:
                return Outcome(tokens, FinishReason.STOP, stop)
        if num_prompt + len(tokens) >= max_request_tokens:
            break
    return Outcome(tokens, FinishReason.LENGTH)


def completed_stop(token_ids: Sequence[int], stops: Sequence[str]) -> str | None:
    """The stop string that the last token completes: the first to end, then the first listed."""
    text = "".join(PIECES[token_id] for token_id in token_ids)
    for end in range(len(text) - len(PIECES[token_ids[-1]]) + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop
    return None


class PieceStream:
    """A TextStream of one piece a token."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(PIECES[token_id] for token_id in token_ids)

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
    follow a token that the slot has chosen, the pages hold the whole context, and no committed
    row lies beyond the request's length. A verify step commits rows up to the first draft that
    is wrong or the first token that ends the run; no later step may read the rows after them.
    """

    def __init__(self, limits: SchedulerLimits, drafts: DraftRule) -> None:
        self.limits = limits
        self.faults: dict[RequestState, Faults] = {}
        self.num_decode_rows = 0
        self._drafts = drafts
        self._slots: dict[int, Slot] = {}
        self._kv: dict[int, int] = {}

    def launch(self, batch: Batch) -> Flight:
        for state in batch.admitted:
            assert state.slot is not None
            self._slots[state.slot] = Slot(state)
        is_verify = batch.kind is Kind.VERIFY
        drafts = [self._propose(entry) if is_verify else [] for entry in batch.entries]
        runs = [
            self._run(batch.kind, entry, entry_drafts)
            for entry, entry_drafts in zip(batch.entries, drafts, strict=True)
        ]
        chosen = [
            (entry.state, index)
            for entry, run in zip(batch.entries, runs, strict=True)
            for index in run
        ]
        result = StepResult(
            token_ids=[token_at(state.request_id, index) for state, index in chosen],
            is_bad=[self.faults[state].bad_index == index for state, index in chosen],
            logprobs=[-float(index) for _, index in chosen],
            tops=[TOP for _ in chosen],
            scores=[
                [self._score(entry.state, row) for row in self._scored_rows(entry)]
                for entry in batch.entries
                if entry.num_scored
            ],
            num_committed=[len(run) for run in runs] if is_verify else None,
            draft_ids=drafts if is_verify else None,
        )
        slots = [entry.slot for entry in batch.entries]
        assert len(set(slots)) == len(slots) and 0 not in slots
        return Flight(batch, result, slots, [list(entry.state.pages) for entry in batch.entries])

    def _propose(self, entry: BatchEntry) -> list[int]:
        drafts = self._drafts(entry.state.request_id, entry.output_index, entry.max_drafts)
        assert len(drafts) <= entry.max_drafts <= self.limits.num_drafts
        return drafts

    def _run(self, kind: Kind, entry: BatchEntry, drafts: list[int]) -> range:
        """Process an entry's rows; the output indexes of the tokens that it chooses."""
        state, slot = entry.state, self._slots[entry.slot]
        assert slot.owner is state, "a slot changed hands without an admission"
        assert entry.start == len(slot.token_ids), "rows are missing or run twice"
        stop = entry.start + entry.num_rows
        if kind is Kind.PREFILL:
            rows = state.tokens_between(entry.start, stop)
        else:
            assert kind is (Kind.VERIFY if self.limits.num_drafts else Kind.DECODE)
            assert entry.num_rows == 1 + self.limits.num_drafts
            assert entry.samples and entry.num_scored == 0
            assert slot.chosen is not None, "a decode row without a token"
            rows = [slot.chosen, *drafts]
            rows += [NO_DRAFT] * (entry.num_rows - len(rows))
            self.num_decode_rows += 1
        assert len(rows) == entry.num_rows > 0
        for position, token_id in enumerate(rows, start=entry.start):
            self._kv[self._kv_slot(state, position)] = token_id
        context = [self._kv[self._kv_slot(state, position)] for position in range(stop)]
        assert context == slot.token_ids + rows, "a row reads what is not its request's"
        known = state.tokens_between(0, stop)[: entry.start + 1]
        assert context[: len(known)] == known, "the host knows other tokens than the slot"
        num_known = stop if kind is Kind.PREFILL else entry.start + 1
        assert entry.output_index == num_known - state.num_prompt or not entry.samples
        run = self._choose(entry, drafts)
        num_kept = entry.num_rows if kind is Kind.PREFILL else len(run)
        slot.token_ids += rows[:num_kept]
        for position in range(entry.start + num_kept, stop):
            self._kv[self._kv_slot(state, position)] = ROLLED_BACK
        slot.chosen = token_at(state.request_id, run[-1]) if run else None
        return run

    def _choose(self, entry: BatchEntry, drafts: list[int]) -> range:
        """The output indexes of the tokens that are accepted: one, and one for each right draft."""
        state, last = entry.state, entry.output_index
        if not entry.samples:
            return range(0)
        for draft in drafts:
            if self._ends_run(state, last) or draft != token_at(state.request_id, last):
                break
            last += 1
        assert last != state.params.max_tokens, "a row beyond max_tokens"
        assert state.num_prompt + last < self.limits.max_request_tokens
        return range(entry.output_index, last + 1)

    def _ends_run(self, state: RequestState, index: int) -> bool:
        """Whether the token at an output index ends its request for all that the device knows."""
        params, token_id = state.params, token_at(state.request_id, index)
        is_end = token_id in params.stop_token_ids or (token_id == EOS and not params.ignore_eos)
        is_bad = self.faults[state].bad_index == index
        return is_bad or (is_end and index >= params.min_tokens)

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
    num_drafted: int = 0
    num_accepted: int = 0
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
        assert self.last is not None
        assert (self.last.num_drafted, self.last.num_accepted) == (
            self.num_drafted,
            self.num_accepted,
        )
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

    def __init__(self, scheduler: Scheduler, drafts: DraftRule = moving_drafts) -> None:
        self.scheduler = scheduler
        self.device = DeviceModel(scheduler.limits, drafts)
        self.flights: deque[Flight] = deque()
        self.records: list[Record] = []
        self.open: dict[str, Record] = {}
        # Of every request in every verify step: drafts, and those that became tokens.
        self.drafts_done: list[tuple[int, int]] = []

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
        records = [self.open.get(entry.state.request_id) for entry in flight.batch.entries]
        updates = self.scheduler.drain(flight.batch, flight.result)
        if flight.batch.kind is Kind.VERIFY:
            self._note_drafts(flight, records, updates)
        self.note(updates)
        self.scheduler.check_integrity()
        return updates

    def _note_drafts(
        self, flight: Flight, records: list[Record | None], updates: list[RequestUpdate]
    ) -> None:
        """Count drafts by what the caller got; only the pages of known tokens are left."""
        drafts = flight.result.draft_ids
        assert drafts is not None
        told = {update.request_id: update.token_ids for update in updates}
        entries = flight.batch.entries
        for entry, pages, record, draft_ids in zip(
            entries, flight.pages, records, drafts, strict=True
        ):
            assert record is not None
            num_accepted = num_equal(draft_ids, told[record.state.request_id])
            record.num_drafted += len(draft_ids)
            record.num_accepted += num_accepted
            self.drafts_done.append((len(draft_ids), num_accepted))
            if entry.state.slot is not None:
                assert entry.state.pages == pages[: -(-entry.state.num_tokens // PAGE_SIZE)]

    def step(self) -> Batch:
        """Launch and drain one step."""
        batch = self.launch()
        assert batch is not None
        self.land()
        return batch

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
        self.check_draft_counts()

    def check_draft_counts(self) -> None:
        """Assert the engine's totals: sums over what each step did for each request."""
        counts = self.scheduler.draft_counts
        done = [(drafted, accepted) for drafted, accepted in self.drafts_done if drafted]
        assert counts.num_drafts == len(done)
        assert counts.num_draft_tokens == sum(drafted for drafted, _ in done)
        assert counts.num_accepted_tokens == sum(accepted for _, accepted in done)
        assert counts.num_accepted_per_position == [
            sum(accepted > position for _, accepted in done)
            for position in range(self.scheduler.limits.num_drafts)
        ]


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading items of two sequences are equal."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def make_scheduler(
    num_pages: int,
    num_slots: int,
    *,
    max_running: int = 8,
    max_prefill: int = 6,
    max_queued: int = 64,
    max_steps_in_flight: int = 1,
    num_drafts: int = 0,
) -> Scheduler:
    """A request may reach the pool's tokens, less those that a verify step may reject of it."""
    limits = SchedulerLimits(
        max_running_requests=max_running,
        max_queued_requests=max_queued,
        max_prefill_tokens=max_prefill,
        max_request_tokens=num_pages * PAGE_SIZE - num_drafts,
        page_size=PAGE_SIZE,
        max_steps_in_flight=max_steps_in_flight,
        num_drafts=num_drafts,
    )
    return Scheduler(
        limits, IndexAllocator("pages", num_pages), IndexAllocator("slots", num_slots), [EOS]
    )


def make_state(request_id: str, num_prompt: int, params: SamplingParams) -> RequestState:
    prompt = [1 + position % 7 for position in range(num_prompt)]
    request = NewRequest(request_id=request_id, prompt_token_ids=prompt, params=params)
    output_text = OutputText(PieceStream(), params) if params.stop_strings else None
    return RequestState(request=request, seed=0, output_text=output_text)
