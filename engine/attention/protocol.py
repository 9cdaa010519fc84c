"""What an attention layer needs of its backend, and what a backend declares about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs


@dataclass(frozen=True)
class RowCapabilities:
    """What a layer or backend can do; the plan refuses what is not declared here.

    `max_rows_per_request`: rows of one request in a DECODE or VERIFY forward (1: decode only).
    `can_capture`: may run inside a captured CUDA graph.
    """

    max_rows_per_request: int
    can_capture: bool


class AttentionBackend(Protocol):
    """Stores the rows' keys and values in the paged cache, then attends.

    Called once per attention layer and forward. It may write only the KV slots named in the
    inputs, and reads only the pages in the page table.
    """

    @property
    def capabilities(self) -> RowCapabilities: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, inputs: ForwardInputs) -> Tensor:
        """q [T, HQ, D] and k, v [T, H, D], rotated; returns [T, HQ, D]."""
        ...
