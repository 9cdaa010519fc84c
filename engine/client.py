"""How a front end talks to an engine, in this process or in its own.

`server/` and the offline `LLM` are written against `EngineClient` and cannot tell which
implementation they hold.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from engine.memory import MemoryPlan
from engine.request import NewRequest, RequestLimits, RequestUpdate


class EngineDeadError(RuntimeError):
    """The engine is gone; every open request has failed and no new one can start."""


class QueueFullError(RuntimeError):
    """The engine's queue is at its bound; the client should retry later."""


class SpeculationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The draft method of an engine; `num_drafts` of a request in one step."""

    algorithm: str
    num_drafts: int
    draft_model_path: str | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a ready engine that do not change.

    `startup_s` maps phase names (load, compile, capture) to seconds, and ready to their sum and
    what lies between (see `engine.startup`). `num_pages` and `num_slots` exclude the padding
    page and the padding slot. `memory` is None where no memory was planned: a stub.
    """

    version: str
    model_type: str
    dtype: str
    device: str
    limits: RequestLimits
    eos_token_ids: list[int]
    page_size: int
    num_pages: int
    num_slots: int
    max_running_requests: int
    startup_s: dict[str, float]
    memory: MemoryPlan | None = None
    speculation: SpeculationInfo | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's counters; totals count from the engine's start.

    `num_recompilations_total`: compilations after the engine was ready; each is a bug. The last
    four count drafts, see `engine.draft_counts`; without speculation there are no positions.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_pages_used: int = 0
    num_slots_used: int = 0
    num_preemptions_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    num_steps_total: int = 0
    num_recompilations_total: int = 0
    num_drafts_total: int = 0
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    num_accepted_per_position: list[int] = []


class EngineClient(Protocol):
    """A running engine.

    Contract: `info` is fixed once the client exists. `generate` yields updates until one
    has a finish_reason, and never raises for a fault of the request itself: that is an
    update with FinishReason.ERROR. Closing the iterator early (aclose, cancellation) aborts
    the request and returns its pages and slot.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_alive(self) -> bool:
        """False once the engine has died; it never comes back."""
        ...

    def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:
        """Run one request; an async generator of its updates.

        Raises:
            EngineDeadError: the engine died before the request finished.
            QueueFullError: the waiting queue is full.
        """
        ...

    async def stats(self) -> EngineStats:
        """Current counters.

        Raises:
            EngineDeadError: the engine is gone.
        """
        ...

    async def close(self) -> None:
        """Abort what runs and release the engine. Calling it twice is harmless."""
        ...
