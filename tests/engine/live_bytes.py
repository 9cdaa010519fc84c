"""Counts the bytes of tensors that live at once, also of tensors without memory ("meta")."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered: the storages made inside that are still referenced, and the most so far."""

    def __init__(self, known: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet(
            tensor.untyped_storage() for tensor in known if tensor is not None
        )

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        num_bytes = storage.nbytes()
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, num_bytes)

    def _drop(self, num_bytes: int) -> None:
        self.now -= num_bytes
