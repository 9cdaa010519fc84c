"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.parameter import empty_weight
from engine.model_config import ModelConfig
from graphs.kernels.linear.reference import linear
from graphs.kernels.moe.reference import moe_experts, route, swiglu


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); `gate_up_proj` has the rows [gate | up]."""

    def __init__(
        self, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.gate_up_proj = empty_weight(2 * intermediate, hidden, dtype=dtype, device=device)
        self.down_proj = empty_weight(hidden, intermediate, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return linear(swiglu(linear(x, self.gate_up_proj)), self.down_proj)


class MoeMlp(nn.Module):
    """The top_k experts of each row, plus the shared expert times its own gate."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.router = empty_weight(experts, hidden, dtype=dtype, device=device)
        self.gate_up_proj = empty_weight(experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = empty_weight(experts, hidden, inner, dtype=dtype, device=device)
        self.shared = DenseMlp(hidden, config.shared_expert_intermediate_size, dtype, device)
        self.shared_gate = empty_weight(1, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, expert_ids = route(x, self.router, self.top_k, self.renormalise)
        routed: Tensor = moe_experts(x, weights, expert_ids, self.gate_up_proj, self.down_proj)
        shared: Tensor = self.shared(x)
        return routed + torch.sigmoid(linear(x, self.shared_gate)) * shared
