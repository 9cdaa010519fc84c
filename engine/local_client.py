"""A client of an engine in this very process and event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.client import EngineDeadError, EngineInfo, EngineStats
from engine.engine import Engine
from engine.request import NewRequest, RequestUpdate, rejection


class LocalClient:
    """Implements `EngineClient`. Construct it inside the running loop it shall use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task = asyncio.get_running_loop().create_task(engine.run())
        self._is_closed = False

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def is_alive(self) -> bool:
        return not self._task.done()

    async def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:
        """See `EngineClient.generate`."""
        updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()
        try:
            self._engine.submit(request, updates.put_nowait)
        except ValueError as refusal:
            yield rejection(request.request_id, refusal)
            return
        is_over = False
        try:
            while not is_over:
                update = await updates.get()
                is_over = update.finish_reason is not None
                if is_over and self._engine.error is not None and update.error is not None:
                    raise EngineDeadError(self._engine.error)
                yield update
        finally:
            if not is_over:
                self._engine.abort(request.request_id)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        if not self.is_alive:
            raise EngineDeadError(self._engine.error or "the engine has stopped")
        return self._engine.stats()

    async def close(self) -> None:
        """See `EngineClient.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            # A failed engine has logged its fault and told every request; nobody else asks.
            self._task.exception()
        self._engine.close()
