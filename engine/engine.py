"""The engine: one asyncio task that plans, launches and drains steps until it is stopped."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from random import Random

from engine.batch import Batch
from engine.client import EngineDeadError, EngineInfo, EngineStats, QueueFullError
from engine.draft_steps import release_ended, tell_drained
from engine.output_text import OutputText
from engine.request import (
    NewRequest,
    RequestUpdate,
    check_request,
)
from engine.request_state import RequestState
from engine.runner import PendingStep, Runner
from engine.scheduler import Scheduler
from engine.spec_protocol import SpecRuntime
from engine.tokens import Tokenizer

logger = logging.getLogger(__name__)

Deliver = Callable[[RequestUpdate], None]


class Engine:
    """Requests in, updates out; everything between happens in `run`.

    All methods belong to the event loop that runs `run`. `submit` and `abort` only queue and
    mark; pages and slots change hands in the loop alone. `has_checks`: their accounting is
    checked after every drain and abort; a fault of it is one of the engine.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        seed: int,
        spec: SpecRuntime | None = None,
        *,
        has_checks: bool = False,
    ) -> None:
        self.info = info
        self.error: str | None = None
        self.has_failed = False
        self._scheduler, self._runner, self._tokenizer = scheduler, runner, tokenizer
        self._spec, self._has_checks = spec, has_checks
        self._seeds = Random(seed)
        self._deliver: dict[str, Deliver] = {}
        self._wake = asyncio.Event()
        self._in_flight: deque[tuple[Batch, PendingStep]] = deque()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def submit(self, request: NewRequest, deliver: Deliver) -> None:
        """Queue a request; `deliver` is called with each of its updates.

        Raises:
            ValueError: the request can never be served, or needs a tokenizer that is not there.
            QueueFullError: the waiting queue is at its bound.
            EngineDeadError: the engine has failed.
        """
        if self.error is not None:
            raise EngineDeadError(self.error)
        check_request(request, self.info.limits)
        if request.params.n != 1:
            raise ValueError("n must be 1 here: split_choices makes single requests of a larger n")
        if request.request_id in self._deliver:
            raise ValueError(f"request id {request.request_id} is already in use")
        if self._scheduler.is_queue_full:
            raise QueueFullError(
                f"{self._scheduler.num_waiting} requests are waiting already; try again later"
            )
        seed = request.params.seed
        state = RequestState(
            request=request,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            output_text=self._output_text(request),
        )
        self._deliver[request.request_id] = deliver
        self._scheduler.submit(state)
        self._num_prompt_tokens += state.num_prompt
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a request early; it still gets a last update, with FinishReason.ABORT."""
        self._scheduler.abort(request_id)
        self._wake.set()

    def stats(self) -> EngineStats:
        """Current counters."""
        scheduler = self._scheduler
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            num_pages_used=scheduler.num_pages_used,
            num_slots_used=scheduler.num_slots_used,
            num_preemptions_total=scheduler.num_preemptions,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_output_tokens,
            num_steps_total=self._num_steps,
            num_recompilations_total=self._runner.num_recompilations,
            num_drafts_total=scheduler.draft_counts.num_drafts,
            num_draft_tokens_total=scheduler.draft_counts.num_draft_tokens,
            num_accepted_tokens_total=scheduler.draft_counts.num_accepted_tokens,
            num_accepted_per_position=list(scheduler.draft_counts.num_accepted_per_position),
        )

    async def run(self) -> None:
        """Serve until cancelled. A fault of the engine itself ends every request and raises."""
        try:
            while True:
                await self._step()
        except asyncio.CancelledError:
            self._fail_all("the engine was stopped")
            raise
        except BaseException as fault:
            logger.exception("the engine has failed")
            self.has_failed = True
            self._fail_all(f"the engine has failed: {type(fault).__name__}")
            raise

    def close(self) -> None:
        """Release the runner's thread; call after `run` has ended."""
        self.error = self.error or "the engine was closed"
        self._runner.close()

    async def _step(self) -> None:
        """Launch what can be, then drain the oldest step in flight, or wait for a request."""
        aborted = self._scheduler.release_aborted()
        self._send(aborted)
        if self._spec is not None:
            release_ended(self._spec, aborted)
        # The drain before this step is checked too: nothing has run since.
        if self._has_checks:
            self._scheduler.check_integrity()
        while len(self._in_flight) < self._scheduler.limits.max_steps_in_flight:
            batch = self._scheduler.next_batch()
            for request_id in self._scheduler.take_preempted():
                if self._spec is not None:
                    self._spec.release(request_id)
            if batch is None:
                break
            self._in_flight.append((batch, self._runner.launch(batch)))
        if not self._in_flight:
            assert not self._scheduler.has_work, "requests wait and nothing can run"
            self._wake.clear()
            await self._wake.wait()
            return
        batch, step = self._in_flight.popleft()
        result = await step.wait()
        self._num_steps += 1
        updates = self._scheduler.drain(batch, result)
        # Callers first: what a draft method raises ends the engine, and no request's last update.
        self._send(updates)
        if self._spec is not None:
            tell_drained(self._spec, batch, result)
            release_ended(self._spec, updates)

    def _fail_all(self, error: str) -> None:
        self.error = error
        self._in_flight.clear()
        self._send(self._scheduler.fail_all(error))

    def _send(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self._num_output_tokens += len(update.token_ids)
            deliver = self._deliver[update.request_id]
            if update.finish_reason is not None:
                del self._deliver[update.request_id]
            deliver(update)

    def _output_text(self, request: NewRequest) -> OutputText | None:
        params = request.params
        if not params.stop_strings:
            return None
        if self._tokenizer is None:
            raise ValueError("stop: this checkpoint has no tokenizer; use stop_token_ids")
        stream = self._tokenizer.stream(
            request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        return OutputText(stream, params)
