"""Mixture of experts in plain torch: softmax top-k routing and a loop over experts hit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.linear.reference import gated_linear, linear, swiglu


def route(x: Tensor, router: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row of x [T, hidden]: fp32 weights and int32 ids, [T, top_k].

    Best first; equal logits rank by expert id, lowest first. `renormalise` makes the weights
    sum to 1. Logits are in x's dtype, where the Triton op keeps fp32.
    """
    logits = F.linear(x, router).float()
    expert_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(-1).gather(1, expert_ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, expert_ids.int()


@torch.library.custom_op("deltaloom::moe_experts_reference", mutates_args=())
def moe_experts(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    """Sum over each row's experts of weight * down(swiglu(gate_up(x))).

    x [T, hidden], weights fp32 and expert_ids [T, top_k], gate_up_weight [E, 2 * I, hidden],
    down_weight [E, hidden, I].
    """
    out = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        rows, choice = torch.where(expert_ids == expert)
        inner = swiglu(F.linear(x[rows], gate_up_weight[expert]))
        scaled = F.linear(inner, down_weight[expert]) * weights[rows, choice, None].to(x.dtype)
        out.index_add_(0, rows, scaled)
    return out


@moe_experts.register_fake
def _(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    return torch.empty_like(x)


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
    """Routed experts plus sigmoid(shared_gate x) times the shared expert, [T, hidden].

    x [T, hidden], router [E, hidden], gate_up [E, 2 * I, hidden] with the rows [gate | up],
    down [E, hidden, I], shared_gate_up [2 * S, hidden], shared_down [hidden, S],
    shared_gate [1, hidden].
    """
    weights, expert_ids = route(x, router, top_k, renormalise)
    routed: Tensor = moe_experts(x, weights, expert_ids, gate_up, down)
    shared = linear(gated_linear(x, shared_gate_up), shared_down)
    return routed + torch.sigmoid(linear(x, shared_gate)) * shared
