"""Who runs next, and what each step's result means for its requests.

Pure bookkeeping: no tensors, no clocks that decide anything, no asyncio. `next_batch` plans
one step, `drain` commits its result; pages and slots change owner only in these two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine.batch import Batch, BatchEntry, StepResult
from engine.cache.allocator import IndexAllocator
from engine.commit import commit_scores, commit_token, fail, finish_update, take_update
from engine.request import FinishReason, RequestUpdate
from engine.request_state import RequestState
from graphs.inputs import Kind


@dataclass(frozen=True)
class SchedulerLimits:
    """Caps in force: requests running and waiting, prompt tokens per step, request length."""

    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    max_request_tokens: int
    page_size: int


class Scheduler:
    """First come, first served, with chunked prefill that alternates with decode steps.

    A request is admitted when a slot and the pages of all its known tokens are free. When a
    decode needs a page and none is free, the request admitted last gives up everything and
    goes back to the head of the queue; it recomputes its tokens later and loses none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: IndexAllocator,
        slots: IndexAllocator,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._pages, self._slots = pages, slots
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._by_id: dict[str, RequestState] = {}
        self._in_flight: Batch | None = None
        self._last_kind = Kind.DECODE

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages_used(self) -> int:
        return self._pages.num_used

    @property
    def num_slots_used(self) -> int:
        return self._slots.num_used

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def is_queue_full(self) -> bool:
        """Whether one more request must be refused: running and waiting are at their caps."""
        limits = self.limits
        return len(self._by_id) >= limits.max_running_requests + limits.max_queued_requests

    def submit(self, state: RequestState) -> None:
        """Queue a checked request. Its id must be new and the queue not full."""
        assert state.request_id not in self._by_id, f"request id {state.request_id} is in use"
        assert not self.is_queue_full
        self._by_id[state.request_id] = state
        self._waiting.append(state)

    def abort(self, request_id: str) -> None:
        """Mark a request; the next `next_batch` or `drain` ends it. Unknown ids are over."""
        if (state := self._by_id.get(request_id)) is not None:
            state.is_aborted = True

    def release_aborted(self) -> list[RequestUpdate]:
        """End marked requests that no step in flight is using."""
        flying = {entry.state for entry in self._in_flight.entries} if self._in_flight else set()
        ended = [s for s in self._by_id.values() if s.is_aborted and s not in flying]
        for state in ended:
            state.finish_reason = FinishReason.ABORT
            self._release(state)
        return [finish_update(state) for state in ended]

    def next_batch(self) -> Batch | None:
        """The next step, None when nothing can run now. One step is in flight at a time."""
        assert self._in_flight is None, "the last step was not drained"
        if self._last_kind is Kind.PREFILL:
            batch = self._plan_decode() or self._plan_prefill()
        else:
            batch = self._plan_prefill() or self._plan_decode()
        if batch is not None:
            self._in_flight = batch
            self._last_kind = batch.kind
        return batch

    def drain(self, batch: Batch, result: StepResult) -> list[RequestUpdate]:
        """Commit a step: append tokens, end what is over, return pages and slots.

        Returns one update per request that has something to tell.
        """
        assert batch is self._in_flight
        self._in_flight = None
        scores = iter(result.scores)
        for entry in batch.entries:
            entry.state.num_computed += entry.num_rows
            if entry.num_scored:
                commit_scores(entry, next(scores))
        for index, entry in enumerate(batch.sampling_entries):
            if not entry.state.is_aborted and entry.state.finish_reason is None:
                commit_token(
                    entry.state, result, index, self._eos_token_ids, self.limits.max_request_tokens
                )
        updates = []
        for state in (entry.state for entry in batch.entries):
            if state.is_aborted:
                state.finish_reason = FinishReason.ABORT
            elif state.num_pending == 0 and state.finish_reason is None:
                # Nothing was to be sampled: the request only wanted its prompt scored.
                state.finish_reason = FinishReason.LENGTH
            if (update := take_update(state)) is not None:
                updates.append(update)
            if state.finish_reason is not None:
                self._release(state)
        return updates

    def fail_all(self, message: str) -> list[RequestUpdate]:
        """End every request with an error: the engine cannot go on."""
        self._in_flight = None
        states = list(self._by_id.values())
        for state in states:
            fail(state)
            self._release(state)
        return [finish_update(state, error=message) for state in states]

    def check_integrity(self) -> None:
        """Assert that every page and slot has exactly one owner."""
        owners = [*self._running, *self._waiting]
        assert len(owners) == len(set(owners)) == len(self._by_id)
        self._pages.check_integrity(page for state in owners for page in state.pages)
        self._slots.check_integrity(s.slot for s in owners if s.slot is not None)
        assert all(state.slot is not None for state in self._running)
        for state in self._waiting:
            assert state.slot is None and not state.pages and state.num_computed == 0
        for state in self._running:
            assert len(state.pages) * self.limits.page_size >= state.num_computed

    def _plan_prefill(self) -> Batch | None:
        budget = self.limits.max_prefill_tokens
        entries = []
        for state in self._running:
            if budget > 0 and not state.is_decoding:
                entries.append(self._prefill_entry(state, budget))
                budget -= entries[-1].num_rows
        admitted = []
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            state = self._waiting.popleft()
            self._running.append(state)
            admitted.append(state)
            entries.append(self._prefill_entry(state, budget))
            budget -= entries[-1].num_rows
        if not entries:
            return None
        return Batch(Kind.PREFILL, tuple(entries), tuple(admitted))

    def _prefill_entry(self, state: RequestState, budget: int) -> BatchEntry:
        start = state.num_computed
        num_rows = min(state.num_pending, budget)
        num_scored = 0
        if state.params.prompt_logprobs is not None:
            num_scored = max(min(start + num_rows, state.num_prompt - 1) - start, 0)
        is_last = num_rows == state.num_pending
        samples = is_last and state.params.max_tokens != 0
        return BatchEntry(state, start, num_rows, samples, num_scored)

    def _plan_decode(self) -> Batch | None:
        entries = []
        for state in list(self._running):
            if state.slot is None or not state.is_decoding:
                continue
            if self._grow(state):
                entries.append(BatchEntry(state, state.num_computed, 1, samples=True))
        # Victims are taken from the end while this goes from the front: no entry lost its slot.
        assert all(entry.state.slot is not None for entry in entries)
        return Batch(Kind.DECODE, tuple(entries)) if entries else None

    def _admit(self, state: RequestState) -> bool:
        if len(self._running) >= self.limits.max_running_requests or self._slots.num_free == 0:
            return False
        # One token more than known, so that the first decode does not preempt at once.
        num_tokens = min(state.num_tokens + 1, self.limits.max_request_tokens)
        pages = self._pages.take(self._num_pages_for(num_tokens))
        if pages is None:
            return False
        slots = self._slots.take(1)
        assert slots is not None
        state.pages, state.slot = pages, slots[0]
        state.leave_queue()
        return True

    def _grow(self, state: RequestState) -> bool:
        """Own the page of the next row, at the cost of later requests, or of itself."""
        while len(state.pages) < self._num_pages_for(state.num_computed + 1):
            taken = self._pages.take(1)
            if taken is not None:
                state.pages += taken
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        self.num_preemptions += 1
        self._running.remove(state)
        self._give_back(state)
        state.num_computed = 0
        self._waiting.appendleft(state)

    def _release(self, state: RequestState) -> None:
        del self._by_id[state.request_id]
        if state.slot is None:
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        assert state.slot is not None
        self._pages.give_back(state.pages)
        self._slots.give_back([state.slot])
        state.pages, state.slot = [], None

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)
