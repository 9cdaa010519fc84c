"""Who runs next, and what each step's result means for its requests.

Pure bookkeeping: no tensors, no clocks that decide anything, no asyncio. `next_batch` plans
one step, `drain` commits its result. With overlap a step is planned while the one before it is
in flight, on what is certain by then: how many tokens there will be, not which.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from engine.batch import Batch, StepResult
from engine.cache.allocator import IndexAllocator
from engine.commit import (
    commit_scores,
    commit_token,
    commit_verified,
    fail,
    finish_update,
    take_update,
)
from engine.draft_counts import DraftCounts
from engine.entries import decode_entry, is_complete, prefill_entry
from engine.request import FinishReason, RequestUpdate
from engine.request_state import RequestState
from engine.scheduler_limits import SchedulerLimits
from graphs.inputs import Kind


class Scheduler:
    """First come, first served, with chunked prefill that alternates with decode steps.

    A request is admitted when a slot and the pages of all its known tokens are free. When a
    decode needs a page and none is free, the request admitted last gives up everything and
    goes back to the head of the queue; it recomputes its tokens later and loses none. That
    never happens while a step is in flight, so a request in flight keeps what it owns.

    A stop is known one step late with overlap. The request's last update goes out at once and
    its id is free again; it *leaves* when no step in flight uses its pages and slot, and what
    such a step has chosen for it is ignored. Stops by length are foreseen and cost no row.

    A verify step has a request's pending token and its drafts in a row each. How many of them are
    committed is known when it is drained; the rest is rolled back then, and so are their pages.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: IndexAllocator,
        slots: IndexAllocator,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.limits = limits
        assert limits.num_drafts == 0 or limits.max_steps_in_flight == 1
        self.forget_counts()
        self._pages, self._slots = pages, slots
        self._eos_token_ids = frozenset(eos_token_ids)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._leaving: set[RequestState] = set()
        self._by_id: dict[str, RequestState] = {}
        self._marked: list[RequestState] = []
        self._in_flight: deque[Batch] = deque()
        self._preempted_ids: list[str] = []
        self._last_kind = Kind.DECODE

    def forget_counts(self) -> None:
        """Count anew: a made-up request at start-up is none of a user's."""
        self.num_preemptions = 0
        self.draft_counts = DraftCounts(num_accepted_per_position=[0] * self.limits.num_drafts)

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
        """Whether a request is not over, or is and still holds its pages and slot."""
        return bool(self._by_id or self._leaving)

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
        """Mark a request; the next `release_aborted` or `drain` ends it. Unknown ids are over."""
        state = self._by_id.get(request_id)
        if state is not None and not state.is_aborted:
            state.is_aborted = True
            self._marked.append(state)

    def release_aborted(self) -> list[RequestUpdate]:
        """End marked requests that no step in flight is using."""
        return self._end_aborted([s for s in self._marked if s.num_steps_in_flight == 0])

    def next_batch(self) -> Batch | None:
        """The next step, to be launched at once; at most `max_steps_in_flight` are undrained.

        None when nothing can run now: either nothing is left to do, or a drain must come first.
        """
        assert len(self._in_flight) < self.limits.max_steps_in_flight, "no step was drained"
        batch = self._plan()
        if batch is not None:
            for entry in batch.entries:
                entry.state.launch(entry.num_rows, samples=entry.samples)
            self._in_flight.append(batch)
            self._last_kind = batch.kind
        return batch

    def take_preempted(self) -> list[str]:
        """Ids of requests that gave up what they owned, each told once."""
        taken, self._preempted_ids = self._preempted_ids, []
        return taken

    def drain(self, batch: Batch, result: StepResult) -> list[RequestUpdate]:
        """Commit the oldest step in flight: append tokens, end what is over, return its pages.

        Returns one update per request that has something to tell.
        """
        assert self._in_flight and batch is self._in_flight[0], "steps are drained as launched"
        self._in_flight.popleft()
        self._commit(batch, result)
        updates = []
        for state in (entry.state for entry in batch.entries):
            if state in self._leaving:
                self._let_go(state)
                continue
            if state.num_computed == state.num_tokens and not state.is_over:
                # Nothing was to be sampled: the request only wanted its prompt scored.
                state.finish_reason = FinishReason.LENGTH
            if (update := take_update(state)) is not None:
                updates.append(update)
            if state.finish_reason is not None:
                self._end(state)
        return updates + self._end_aborted(list(self._marked))

    def fail_all(self, message: str) -> list[RequestUpdate]:
        """End every request with an error and forget the steps in flight: the engine is over.

        Asks nothing of the accounting: it may be what has failed, and callers are waiting.
        """
        states = list(self._by_id.values())
        for state in (*states, *self._leaving):
            state.num_steps_in_flight = state.num_tokens_in_flight = 0
            state.pages, state.slot = [], None
        for requests in (self._running, self._waiting, self._leaving, self._by_id, self._marked):
            requests.clear()
        self._in_flight.clear()
        self._pages.give_back_all()
        self._slots.give_back_all()
        for state in states:
            fail(state)
        return [finish_update(state, error=message) for state in states]

    def check_integrity(self) -> None:
        """Assert that every page and slot has exactly one owner."""
        owners = [*self._running, *self._waiting, *self._leaving]
        assert len(owners) == len(set(owners)) == len(self._by_id) + len(self._leaving)
        self._pages.check_integrity(page for state in owners for page in state.pages)
        self._slots.check_integrity(s.slot for s in owners if s.slot is not None)
        flights = Counter(entry.state for batch in self._in_flight for entry in batch.entries)
        assert flights.keys() <= set(owners)
        for state in owners:
            assert state.num_steps_in_flight == flights[state]
        for state in self._waiting:
            assert state.slot is None and not state.pages and state.num_launched == 0
        for state in (*self._running, *self._leaving):
            assert state.slot is not None
            assert len(state.pages) * self.limits.page_size >= state.num_launched
            assert state.num_launched >= state.num_computed
        assert all(state.finish_reason is None for state in self._by_id.values())
        assert all(s.finish_reason is not None and flights[s] > 0 for s in self._leaving)
        assert all(self._by_id[state.request_id] is state for state in self._marked)

    def _commit(self, batch: Batch, result: StepResult) -> None:
        eos_ids, max_tokens = self._eos_token_ids, self.limits.max_request_tokens
        if batch.kind is Kind.VERIFY:
            commit_verified(batch, result, self.draft_counts, eos_ids, max_tokens)
            for entry in batch.entries:
                self._return_pages(entry.state)
            return
        scores = iter(result.scores)
        for entry in batch.entries:
            entry.state.land(entry.num_rows, samples=entry.samples)
            # Taken in any case: the next entry's scores follow.
            entry_scores = next(scores) if entry.num_scored else None
            if entry_scores is not None and not entry.state.is_over:
                commit_scores(entry, entry_scores)
        for index, entry in enumerate(batch.sampling_entries):
            if not entry.state.is_over:
                commit_token(entry.state, result, index, eos_ids, max_tokens)

    def _return_pages(self, state: RequestState) -> None:
        """Return the pages of rows that were rolled back; that of the pending token stays."""
        num_kept = self._num_pages_for(state.num_launched + 1)
        self._pages.give_back(state.pages[num_kept:])
        del state.pages[num_kept:]

    def _plan(self) -> Batch | None:
        if self._last_kind is not Kind.PREFILL and (batch := self._plan_prefill()) is not None:
            return batch
        if self._in_flight and self._lacks_pages():
            # The step in flight may end a request and so spare another one its preemption.
            return None
        return self._plan_decode() or self._plan_prefill()

    def _plan_prefill(self) -> Batch | None:
        budget = self.limits.max_prefill_tokens
        entries = []
        for state in self._running:
            if budget > 0 and not (state.is_prefilled or state.is_aborted):
                entries.append(prefill_entry(state, budget, self.limits))
                budget -= entries[-1].num_rows
        admitted = []
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            state = self._waiting.popleft()
            self._running.append(state)
            admitted.append(state)
            entries.append(prefill_entry(state, budget, self.limits))
            budget -= entries[-1].num_rows
        if not entries:
            return None
        return Batch(Kind.PREFILL, tuple(entries), tuple(admitted))

    def _plan_decode(self) -> Batch | None:
        entries = []
        for state in list(self._running):
            if state.slot is not None and self._can_decode(state) and self._grow(state):
                entries.append(decode_entry(state, self.limits))
        # Victims are taken from the end while this goes from the front: no entry lost its slot.
        assert all(entry.state.slot is not None for entry in entries)
        kind = Kind.VERIFY if self.limits.num_drafts else Kind.DECODE
        return Batch(kind, tuple(entries)) if entries else None

    def _can_decode(self, state: RequestState) -> bool:
        return state.is_prefilled and not state.is_aborted and not is_complete(state, self.limits)

    def _admit(self, state: RequestState) -> bool:
        if len(self._running) >= self.limits.max_running_requests or self._slots.num_free == 0:
            return False
        # The rows of the first decode too, so that it does not preempt at once.
        num_tokens = min(
            state.num_tokens + self.limits.rows_per_request,
            self.limits.max_request_tokens + self.limits.num_drafts,
        )
        num_pages = self._num_pages_for(num_tokens)
        # What running requests need next stays free, or one of them would be preempted for this.
        if num_pages + self._num_lacking() > self._pages.num_free:
            return False
        pages = self._pages.take(num_pages)
        if pages is None:
            return False
        slots = self._slots.take(1)
        assert slots is not None
        state.admit(slots[0], pages)
        return True

    def _grow(self, state: RequestState) -> bool:
        """Own the pages of the next rows, at the cost of later requests, or of itself."""
        while self._num_missing_pages(state) > 0:
            taken = self._pages.take(1)
            if taken is not None:
                state.pages += taken
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _lacks_pages(self) -> bool:
        """Whether a decode step planned now would preempt."""
        return self._num_lacking() > self._pages.num_free

    def _num_lacking(self) -> int:
        """Pages that a decode step planned now would take."""
        decoding = (state for state in self._running if self._can_decode(state))
        return sum(map(self._num_missing_pages, decoding))

    def _num_missing_pages(self, state: RequestState) -> int:
        """Pages that the next rows of a request need and the request does not own."""
        num_tokens = state.num_launched + self.limits.rows_per_request
        return max(self._num_pages_for(num_tokens) - len(state.pages), 0)

    def _preempt(self, state: RequestState) -> None:
        assert not self._in_flight, "a step in flight may use the victim's pages"
        self.num_preemptions += 1
        self._preempted_ids.append(state.request_id)
        self._running.remove(state)
        self._give_back(state)
        state.restart()
        self._waiting.appendleft(state)

    def _end_aborted(self, states: list[RequestState]) -> list[RequestUpdate]:
        for state in states:
            state.finish_reason = FinishReason.ABORT
            self._end(state)
        self._marked = [state for state in self._marked if state.finish_reason is None]
        return [finish_update(state) for state in states]

    def _end(self, state: RequestState) -> None:
        """The request is over for its caller; what it owns may be in use a little longer."""
        del self._by_id[state.request_id]
        if state.slot is None:
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._leaving.add(state)
            self._let_go(state)

    def _let_go(self, state: RequestState) -> None:
        """Return what a leaving request owns unless a step in flight uses it."""
        if state.num_steps_in_flight == 0:
            self._leaving.remove(state)
            self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        assert state.slot is not None
        self._pages.give_back(state.pages)
        self._slots.give_back([state.slot])
        state.pages, state.slot = [], None

    def _num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)
