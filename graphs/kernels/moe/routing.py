"""From rows to pairs sorted by expert: the launches of router, top-k and grouping.

A pair is a row and one of its slots: slots 0 .. top_k - 1 are the chosen experts, best first,
slot top_k is the shared expert. Pair index: row * (top_k + 1) + slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.moe.configs import RouterConfig
from graphs.kernels.moe.grouping_kernel import group_pairs_kernel
from graphs.kernels.moe.router_kernel import route_kernel, router_logits_kernel

LOGITS_PADDING = 16  # the shared gate's column, and rows that start aligned
CHUNKS_BLOCK = 16
TILES_BLOCK = 32


@dataclass(frozen=True)
class Routing:
    """Per pair [T, slots]: fp32 weights, int32 ids, int32 ranks; and the counts of each chunk
    of rows [chunks, E] int8 (see `route_kernel`)."""

    weights: Tensor
    ids: Tensor
    ranks: Tensor
    counts: Tensor


def router_logits(x: Tensor, router: Tensor, shared_gate: Tensor, config: RouterConfig) -> Tensor:
    """fp32 partial logits [splits, T, E + 16]; column E is of shared_gate [1, hidden]."""
    assert router.is_contiguous() and shared_gate.is_contiguous()
    num_rows, hidden = x.shape
    num_experts, dot = router.shape[0], config.dot
    logits = torch.empty(
        config.splits, num_rows, num_experts + LOGITS_PADDING, dtype=torch.float32, device=x.device
    )
    split_size = triton.cdiv(triton.cdiv(hidden, config.splits), dot.block_k) * dot.block_k
    num_blocks = triton.cdiv(num_experts, dot.block_n) + 1
    launch(router_logits_kernel)[
        (triton.cdiv(num_rows, dot.block_m) * config.splits * num_blocks,)
    ](
        x,
        router,
        shared_gate,
        logits,
        num_rows,
        HIDDEN=hidden,
        NUM_EXPERTS=num_experts,
        LOGITS_STRIDE=logits.shape[2],
        SPLITS=config.splits,
        SPLIT_SIZE=split_size,
        BLOCK_M=dot.block_m,
        BLOCK_N=dot.block_n,
        BLOCK_K=dot.block_k,
        num_warps=dot.num_warps,
        num_stages=dot.num_stages,
    )
    return logits


def choose_experts(
    logits: Tensor,
    num_experts: int,
    top_k: int,
    num_slots: int,
    renormalise: bool,
    config: RouterConfig,
) -> Routing:
    """Top-k of logits [splits, T, E + 16]; num_slots is top_k, or top_k + 1 with the shared."""
    assert config.route_rows < 128  # counts are int8
    splits, num_rows, logits_stride = logits.shape
    num_chunks = triton.cdiv(num_rows, config.route_rows)
    weights = torch.empty(num_rows, num_slots, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_slots, dtype=torch.int32, device=logits.device)
    ranks = torch.empty(num_rows, num_slots, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int8, device=logits.device)
    launch(route_kernel)[(num_chunks,)](
        logits,
        weights,
        ids,
        ranks,
        counts,
        num_rows,
        NUM_EXPERTS=num_experts,
        LOGITS_STRIDE=logits_stride,
        TOP_K=top_k,
        NUM_SLOTS=num_slots,
        RENORMALISE=renormalise,
        SPLITS=splits,
        ROWS=config.route_rows,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        num_warps=config.route_warps,
    )
    return Routing(weights, ids, ranks, counts)


def group_pairs(routing: Routing, config: RouterConfig, tile_rows: int) -> tuple[Tensor, Tensor]:
    """pairs [T * slots] in the order of their experts and tiles [3, N], both int32.

    See `group_pairs_kernel`. N is what no routing exceeds.
    """
    num_rows, num_slots = routing.ids.shape
    num_chunks, num_experts = routing.counts.shape
    num_routed = num_rows * (num_slots - 1)
    # Every expert hit has one tile that may be partly filled.
    num_tiles = num_routed // tile_rows + torch.sym_min(num_experts, num_routed)
    num_tiles = num_tiles + triton.cdiv(num_rows, tile_rows)
    pairs = torch.empty(num_rows * num_slots, dtype=torch.int32, device=routing.ids.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=routing.ids.device)
    launch(group_pairs_kernel)[(num_chunks + triton.cdiv(num_tiles, TILES_BLOCK),)](
        routing.ids,
        routing.ranks,
        routing.counts,
        pairs,
        tiles,
        num_rows,
        num_chunks,
        num_tiles,
        NUM_EXPERTS=num_experts,
        TOP_K=num_slots - 1,
        ROWS=config.route_rows,
        TILE_ROWS=tile_rows,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts),
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        CHUNKS_BLOCK=CHUNKS_BLOCK,
        TILES_BLOCK=TILES_BLOCK,
        num_warps=config.group_warps,
    )
    return pairs, tiles
