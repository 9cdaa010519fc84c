"""Who owns which page or slot: a free list with accounting, no tensors."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.pools import PADDING_INDEX


class IndexAllocator:
    """Hands out the indices 1..num_items of a pool; 0 is padding and never handed out.

    Mutated only by the scheduler. The lowest free index comes first, so that a quiet engine
    touches little memory.
    """

    def __init__(self, name: str, num_items: int) -> None:
        self._name = name
        self._num_items = num_items
        self.give_back_all()

    @property
    def num_items(self) -> int:
        return self._num_items

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_items - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` indices, or None and no change when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for index in taken:
            self._is_used[index] = True
        return taken

    def give_back(self, indices: Iterable[int]) -> None:
        """Return indices that were taken; giving one back twice is a bug."""
        for index in indices:
            assert index != PADDING_INDEX, f"{self._name}: padding was given back"
            assert self._is_used[index], f"{self._name}: {index} was given back twice"
            self._is_used[index] = False
            self._free.append(index)

    def give_back_all(self) -> None:
        """Return every index, whoever owned it and whatever the accounting says."""
        self._free = list(range(self._num_items, PADDING_INDEX, -1))
        self._is_used = [False] * (self._num_items + 1)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that `owned` (by all requests together) and the free list split the pool."""
        owned_list = list(owned)
        assert len(set(owned_list)) == len(owned_list), f"{self._name}: an index has two owners"
        free = set(self._free)
        assert len(free) == len(self._free), f"{self._name}: an index is free twice"
        assert not free & set(owned_list), f"{self._name}: an owned index is free"
        assert len(free) + len(owned_list) == self._num_items, f"{self._name}: an index is lost"
        assert PADDING_INDEX not in free and PADDING_INDEX not in owned_list
        assert all(self._is_used[index] for index in owned_list)
