"""What an attention layer needs of its backend, and what a backend declares about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs

# The most rows of one request that a verify step is made and tested for: seven drafts.
MAX_VERIFY_ROWS = 8


@dataclass(frozen=True)
class RowCapabilities:
    """What a layer or backend can do; the plan refuses what is not declared here.

    `max_rows_per_request`: rows of one request in a DECODE or VERIFY forward (1: decode only).
    `can_capture`: may run inside a captured CUDA graph.
    """

    max_rows_per_request: int
    can_capture: bool


@dataclass(frozen=True)
class HeadParameters:
    """What is done to each query and key head before attention.

    q_norm, k_norm [D]: zero-centred norm weights. inv_freq [rotary_dim / 2] fp32.
    """

    q_norm: Tensor
    k_norm: Tensor
    inv_freq: Tensor
    num_q_heads: int
    eps: float


class AttentionBackend(Protocol):
    """Norms and rotates heads, stores keys and values in the paged cache, then attends.

    Called once per attention layer and forward. It may write only the KV slots named in the
    inputs, and reads only the pages in the page table.
    """

    @property
    def capabilities(self) -> RowCapabilities: ...

    def attend(
        self, qkv: Tensor, heads: HeadParameters, kv: KvLayer, inputs: ForwardInputs
    ) -> Tensor:
        """qkv [T, 2 * HQ * D + 2 * H * D], columns [per query head: q, gate | k | v].

        Returns the attended values times the sigmoid of the gates, [T, HQ * D].
        """
        ...
