"""Mixture of experts in plain torch: softmax top-k routing and a loop over experts hit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [..., 2 * I] halves."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def route(x: Tensor, router_weight: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The top_k experts of each row of x [T, hidden]: weights and int64 ids, both [T, top_k]."""
    probabilities = F.linear(x, router_weight).float().softmax(-1)
    weights, expert_ids = probabilities.topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), expert_ids


@torch.library.custom_op("deltaloom::moe_experts_reference", mutates_args=())
def moe_experts(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    """Sum over each row's experts of weight * down(swiglu(gate_up(x))).

    x [T, hidden], weights and expert_ids [T, top_k], gate_up_weight [E, 2 * I, hidden],
    down_weight [E, hidden, I].
    """
    out = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        rows, choice = torch.where(expert_ids == expert)
        inner = swiglu(F.linear(x[rows], gate_up_weight[expert]))
        scaled = F.linear(inner, down_weight[expert]) * weights[rows, choice, None]
        out.index_add_(0, rows, scaled)
    return out


@moe_experts.register_fake
def _(
    x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up_weight: Tensor, down_weight: Tensor
) -> Tensor:
    return torch.empty_like(x)
