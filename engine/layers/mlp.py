"""Feed-forward layers: dense, and a mixture of experts with a shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.parameter import empty_weight
from engine.model_config import ModelConfig
from graphs.kernels.kernel_set import KernelSet


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x)); `gate_up_proj` has the rows [gate | up]."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up_proj = empty_weight(2 * intermediate, hidden, dtype=dtype, device=device)
        self.down_proj = empty_weight(hidden, intermediate, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.kernels.linear(self.kernels.gated_linear(x, self.gate_up_proj), self.down_proj)


class MoeMlp(nn.Module):
    """The top_k experts of each row, plus the shared expert times its own gate."""

    def __init__(
        self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.kernels = kernels
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.renormalise = config.norm_topk_prob
        self.router = empty_weight(experts, hidden, dtype=dtype, device=device)
        self.gate_up_proj = empty_weight(experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = empty_weight(experts, hidden, inner, dtype=dtype, device=device)
        self.shared = DenseMlp(
            hidden, config.shared_expert_intermediate_size, kernels, dtype, device
        )
        self.shared_gate = empty_weight(1, hidden, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.kernels.moe_mlp(
            x,
            self.router,
            self.gate_up_proj,
            self.down_proj,
            self.shared.gate_up_proj,
            self.shared.down_proj,
            self.shared_gate,
            self.top_k,
            self.renormalise,
        )
