"""The device memory that requests own pieces of: KV pages and GDN state slots.

Each pool is one stacked allocation `[layer, ...]`; a layer holds the view of its own index.
Index 0 of pages and slots is padding: rows that belong to no request write there. Who owns
which index is not known here (see `engine.cache.allocator`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_config import LayerKind, ModelConfig
from graphs.kernels.gdn.stash import VerifyStash, allocate_stash

PADDING_INDEX = 0


@dataclass(frozen=True)
class KvLayer:
    """One attention layer's keys and values, each [pages, page_size, num_kv_heads, head_dim].

    `first_token`: tokens of a request before it have none; no row sees them.
    """

    k_pool: Tensor
    v_pool: Tensor
    first_token: int = 0


@dataclass(frozen=True)
class GdnLayer:
    """One GDN layer's conv rings [slots, W, C] and states [slots, HV, V, K].

    `stash`: where a verify step leaves the layer's rows; None where there are no such steps.
    """

    conv_pool: Tensor
    state_pool: Tensor
    stash: VerifyStash | None = None


@dataclass(frozen=True)
class LinearVerifyScratch:
    """What a verify step leaves of all GDN layers for its commit, [layer, request, row, ...].

    A request's part is at its place in the batch. It means nothing once it is committed.
    """

    stash: VerifyStash

    @property
    def rows_per_request(self) -> int:
        """Rows of a request that a step may score."""
        return self.stash.k.shape[2]


@dataclass(frozen=True)
class CachePools:
    """All KV pages [layer, 1 + num_pages, ...] and GDN slots [layer, 1 + num_slots, ...].

    Keys and values are separate allocations: two mutated inputs of one compiled block that
    alias each other make the compiler copy both, pool-sized.
    """

    keys: Tensor
    values: Tensor
    conv: Tensor
    state: Tensor
    scratch: LinearVerifyScratch | None = None

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_pages(self) -> int:
        """Pages that requests can own; the padding page is not one of them."""
        return self.keys.shape[1] - 1

    @property
    def num_slots(self) -> int:
        """Slots that requests can own; the padding slot is not one of them."""
        return self.conv.shape[1] - 1

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, for those who keep their addresses."""
        scratch = () if self.scratch is None else self.scratch.stash
        return self.keys, self.values, self.conv, self.state, *scratch

    def kv_layer(self, index: int) -> KvLayer:
        """The view of the index-th attention layer."""
        return KvLayer(k_pool=self.keys[index], v_pool=self.values[index])

    def gdn_layer(self, index: int) -> GdnLayer:
        """The view of the index-th GDN layer."""
        stash = None if self.scratch is None else self.scratch.stash.layer(index)
        return GdnLayer(self.conv[index], self.state[index], stash)


def allocate_pools(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
    rows_per_request: int = 1,
) -> CachePools:
    """Pools with one extra padding page and slot.

    With several rows_per_request, also the scratch of steps that score so many of each request.
    KV pages are left as they come: attention reads no token that was not written, and memory
    that no request has used yet is not touched. GDN slots are zero.
    """
    num_attention = config.layer_kinds.count(LayerKind.ATTENTION)
    num_gdn = config.layer_kinds.count(LayerKind.GDN)
    kv_shape = (num_attention, 1 + num_pages, page_size, config.num_kv_heads, config.head_dim)
    return CachePools(
        keys=torch.empty(kv_shape, dtype=dtype, device=device),
        values=torch.empty(kv_shape, dtype=dtype, device=device),
        conv=torch.zeros(
            (num_gdn, 1 + num_slots, config.conv_kernel, config.conv_dim),
            dtype=dtype,
            device=device,
        ),
        state=torch.zeros(
            (
                num_gdn,
                1 + num_slots,
                config.num_v_heads_gdn,
                config.head_v_dim_gdn,
                config.head_k_dim_gdn,
            ),
            dtype=state_dtype,
            device=device,
        ),
        scratch=None
        if rows_per_request == 1
        else LinearVerifyScratch(
            allocate_stash(
                num_gdn,
                num_slots,
                rows_per_request,
                num_k_heads=config.num_k_heads_gdn,
                num_v_heads=config.num_v_heads_gdn,
                head_k_dim=config.head_k_dim_gdn,
                head_v_dim=config.head_v_dim_gdn,
                dtype=dtype,
                device=device,
            )
        ),
    )
