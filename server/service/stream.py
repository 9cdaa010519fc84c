"""A stream whose first item is known before anyone reads it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

Item = TypeVar("Item", covariant=True)


class PrimedStream(AsyncIterator[Item]):
    """An async iterator over a generator that has already given its first item.

    Whoever holds it must exhaust it or call `aclose`; both release what the generator holds.
    """

    def __init__(self, first: Item, rest: AsyncGenerator[Item, None]) -> None:
        self._pending = [first]
        self._rest = rest

    async def __anext__(self) -> Item:
        return self._pending.pop() if self._pending else await anext(self._rest)

    async def aclose(self) -> None:
        """End the generator; harmless after its end."""
        await self._rest.aclose()


async def prime(source: AsyncGenerator[Item, None]) -> PrimedStream[Item]:
    """Wait for the first item of `source`, so that an earlier failure is raised here."""
    return PrimedStream(await anext(source), source)
