"""Mixture of experts in Triton, as ops that torch.compile sees through.

Every sum has a fixed order, so results repeat bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphs.kernels.moe.configs import (
    MAX_PAIR_ROWS,
    grouped_config,
    pair_config,
    router_config,
)
from graphs.kernels.moe.experts import Experts, run_grouped, run_pairs
from graphs.kernels.moe.routing import choose_experts, router_logits


@torch.library.triton_op("deltaloom::moe_route", mutates_args=())
def route(x: Tensor, router: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row: fp32 weights and int32 ids, both [T, top_k], best first.

    x [T, hidden], router [E, hidden] of the same dtype. Softmax over fp32 logits that are not
    rounded to the model dtype; equal logits rank by expert id. `renormalise` makes the weights
    sum to 1.
    """
    config = router_config(x.shape[0], x.shape[1], router.shape[0], x.dtype)
    logits = router_logits(x.contiguous(), router, router, config)
    routing = choose_experts(logits, router.shape[0], top_k, top_k, renormalise, config)
    return routing.weights, routing.ids


@torch.library.triton_op("deltaloom::moe_mlp", mutates_args=())
def moe_mlp(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    shared_gate: Tensor,
    top_k: int,
    renormalise: bool,
) -> Tensor:
    """`graphs.kernels.moe.reference.moe_mlp`: routed and shared experts of x [T, hidden].

    fp32 sums throughout; the inner activations and (for more than MAX_PAIR_ROWS rows) each
    expert's weighted output are rounded to x's dtype.
    """
    x = x.contiguous()
    num_rows, hidden = x.shape
    experts = Experts(gate_up, down, shared_gate_up, shared_down)
    config = router_config(num_rows, hidden, experts.num_experts, x.dtype)
    if num_rows <= MAX_PAIR_ROWS:
        pairs = pair_config(num_rows, hidden, experts.inner, top_k, x.dtype)
        logits = router_logits(x, router, shared_gate, config)
        return run_pairs(x, logits, experts, top_k, renormalise, pairs)
    logits = router_logits(x, router, shared_gate, config)
    routing = choose_experts(logits, experts.num_experts, top_k, top_k + 1, renormalise, config)
    grouped = grouped_config(num_rows, experts.num_experts, top_k, hidden, experts.inner, x.dtype)
    return run_grouped(x, routing, experts, config, grouped)
