"""An engine client that never asks for more at once than the engine's queue takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from engine.client import EngineClient, EngineInfo, EngineStats
from engine.request import NewRequest, RequestUpdate


class PacedClient:
    """Implements `EngineClient` over another one; requests over `max_open_requests` wait here.

    One line of a batch may hold thousands of prompts, and no line may fail because the queue
    is full. `num_tokens` counts what was generated.
    """

    def __init__(self, client: EngineClient, max_open_requests: int) -> None:
        self.num_tokens = 0
        self._client = client
        self._free = asyncio.Semaphore(max_open_requests)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    async def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:
        """See `EngineClient.generate`."""
        async with self._free:
            updates = self._client.generate(request)
            assert isinstance(updates, AsyncGenerator)
            async with aclosing(updates):
                async for update in updates:
                    self.num_tokens += len(update.token_ids)
                    yield update

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        return await self._client.stats()

    async def close(self) -> None:
        """See `EngineClient.close`."""
        await self._client.close()
