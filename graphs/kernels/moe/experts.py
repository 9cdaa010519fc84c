"""The experts' products: the launches of the matrix-vector path and of the grouped path.

For pairs and slots see `graphs.kernels.moe.routing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphs.kernels.launch import launch
from graphs.kernels.moe.configs import GroupedConfig, PairConfig, RouterConfig
from graphs.kernels.moe.grouped_kernel import (
    grouped_down_kernel,
    grouped_gate_up_kernel,
    sum_slots_kernel,
)
from graphs.kernels.moe.pair_kernel import pair_down_kernel, pair_gate_up_kernel
from graphs.kernels.moe.routing import Routing, group_pairs


@dataclass(frozen=True)
class Experts:
    """The weights: gate_up [E, 2 * I, hidden] with the rows [gate | up], down [E, hidden, I],
    shared_gate_up [2 * S, hidden], shared_down [hidden, S]; contiguous."""

    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor

    def __post_init__(self) -> None:
        assert self.gate_up.is_contiguous()
        assert self.down.is_contiguous()
        assert self.shared_gate_up.is_contiguous()
        assert self.shared_down.is_contiguous()

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def inner(self) -> int:
        """I, the width of a routed expert."""
        return self.down.shape[2]

    @property
    def shared_inner(self) -> int:
        """S, the width of the shared expert."""
        return self.shared_down.shape[1]


def run_pairs(
    x: Tensor,
    logits: Tensor,
    experts: Experts,
    top_k: int,
    renormalise: bool,
    config: PairConfig,
) -> Tensor:
    """Few rows: every pair streams its expert, in two launches after the router's product."""
    num_rows, hidden = x.shape
    splits, _, logits_stride = logits.shape
    num_slots = top_k + 1
    inner_stride = max(experts.inner, experts.shared_inner)
    inner = torch.empty(num_rows, num_slots, inner_stride, dtype=x.dtype, device=x.device)
    weights = torch.empty(num_rows, num_slots, dtype=torch.float32, device=x.device)
    ids = torch.empty(num_rows, num_slots, dtype=torch.int32, device=x.device)
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    gate_up, down = config.gate_up, config.down
    launch(pair_gate_up_kernel)[
        (num_rows + num_rows * num_slots * triton.cdiv(inner_stride, gate_up.block_n),)
    ](
        x,
        experts.gate_up,
        experts.shared_gate_up,
        logits,
        inner,
        weights,
        ids,
        num_rows,
        HIDDEN=hidden,
        INNER=experts.inner,
        SHARED_INNER=experts.shared_inner,
        NUM_EXPERTS=experts.num_experts,
        LOGITS_STRIDE=logits_stride,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        SPLITS=splits,
        EXPERTS_PADDED=triton.next_power_of_2(experts.num_experts),
        SLOTS_PADDED=triton.next_power_of_2(num_slots),
        BLOCK_N=gate_up.block_n,
        BLOCK_K=gate_up.block_k,
        num_warps=gate_up.num_warps,
    )
    launch(pair_down_kernel)[(num_rows * triton.cdiv(hidden, down.block_n),)](
        inner,
        experts.down,
        experts.shared_down,
        weights,
        ids,
        out,
        HIDDEN=hidden,
        INNER=experts.inner,
        SHARED_INNER=experts.shared_inner,
        TOP_K=top_k,
        SLOTS_AHEAD=config.slots_ahead,
        BLOCK_N=down.block_n,
        BLOCK_K=down.block_k,
        num_warps=down.num_warps,
    )
    return out


def run_grouped(
    x: Tensor, routing: Routing, experts: Experts, router: RouterConfig, config: GroupedConfig
) -> Tensor:
    """Any number of rows: pairs sorted by expert, each expert streamed once per tile."""
    pairs, tiles = group_pairs(routing, router, config.gate_up.block_m)
    inner = grouped_gate_up(x, experts, pairs, tiles, routing.ids.shape[1], config)
    return grouped_down(inner, routing, experts, pairs, tiles, config)


def grouped_gate_up(
    x: Tensor,
    experts: Experts,
    pairs: Tensor,
    tiles: Tensor,
    num_slots: int,
    config: GroupedConfig,
) -> Tensor:
    """inner [T * slots, max(I, S)] in x's dtype, in the order of `pairs`."""
    hidden, dot = x.shape[1], config.gate_up
    inner_stride = max(experts.inner, experts.shared_inner)
    inner = torch.empty(pairs.shape[0], inner_stride, dtype=x.dtype, device=x.device)
    launch(grouped_gate_up_kernel)[(tiles.shape[1] * triton.cdiv(inner_stride, dot.block_n),)](
        x,
        experts.gate_up,
        experts.shared_gate_up,
        pairs,
        tiles,
        inner,
        tiles.shape[1],
        HIDDEN=hidden,
        INNER=experts.inner,
        SHARED_INNER=experts.shared_inner,
        NUM_EXPERTS=experts.num_experts,
        NUM_SLOTS=num_slots,
        BLOCK_M=dot.block_m,
        BLOCK_N=dot.block_n,
        BLOCK_K=dot.block_k,
        num_warps=dot.num_warps,
        num_stages=dot.num_stages,
    )
    return inner


def grouped_down(
    inner: Tensor,
    routing: Routing,
    experts: Experts,
    pairs: Tensor,
    tiles: Tensor,
    config: GroupedConfig,
) -> Tensor:
    """The weighted sum over each row's pairs, [T, hidden] in inner's dtype."""
    (num_rows, num_slots), hidden, dot = routing.ids.shape, experts.down.shape[1], config.down
    outputs = torch.empty(num_rows * num_slots, hidden, dtype=inner.dtype, device=inner.device)
    out = torch.empty(num_rows, hidden, dtype=inner.dtype, device=inner.device)
    launch(grouped_down_kernel)[(tiles.shape[1] * triton.cdiv(hidden, dot.block_n),)](
        inner,
        experts.down,
        experts.shared_down,
        routing.weights,
        pairs,
        tiles,
        outputs,
        tiles.shape[1],
        HIDDEN=hidden,
        INNER=experts.inner,
        SHARED_INNER=experts.shared_inner,
        NUM_EXPERTS=experts.num_experts,
        BLOCK_M=dot.block_m,
        BLOCK_N=dot.block_n,
        BLOCK_K=dot.block_k,
        num_warps=dot.num_warps,
        num_stages=dot.num_stages,
    )
    launch(sum_slots_kernel)[(num_rows * triton.cdiv(hidden, config.sum_block),)](
        outputs,
        out,
        HIDDEN=hidden,
        NUM_SLOTS=num_slots,
        BLOCK_N=config.sum_block,
        num_warps=8,
    )
    return out
