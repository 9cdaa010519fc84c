"""Full attention with per-head q/k norm, partial rotary embedding and an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.protocol import AttentionBackend, HeadParameters, RowCapabilities
from engine.cache.pools import KvLayer
from engine.layers.parameter import empty_weight
from engine.model_config import ModelConfig
from graphs.inputs import ForwardInputs
from graphs.kernels.kernel_set import KernelSet


class AttentionMixer(nn.Module):
    """Keys and values live in the pages of `cache`.

    `qkv_proj` has the rows [per query head: q, gate | k | v].
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KvLayer,
        backend: AttentionBackend,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.cache, self.backend, self.kernels = cache, backend, kernels
        self.num_q_heads = config.num_q_heads
        self.eps = config.rms_norm_eps
        q_rows = config.num_q_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        self.sizes = [2 * q_rows, kv_rows, kv_rows]
        hidden = config.hidden_size
        self.qkv_proj = empty_weight(sum(self.sizes), hidden, dtype=dtype, device=device)
        self.o_proj = empty_weight(hidden, q_rows, dtype=dtype, device=device)
        self.q_norm = empty_weight(config.head_dim, dtype=dtype, device=device)
        self.k_norm = empty_weight(config.head_dim, dtype=dtype, device=device)
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        inv_freq = 1.0 / (config.rope_theta**exponents)
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    @property
    def capabilities(self) -> RowCapabilities:
        """What the backend can do is what the layer can do."""
        return self.backend.capabilities

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """x [T, hidden] -> [T, hidden]; stores the rows' keys and values."""
        heads = HeadParameters(
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            inv_freq=self.get_buffer("inv_freq"),
            num_q_heads=self.num_q_heads,
            eps=self.eps,
        )
        qkv = self.kernels.linear(x, self.qkv_proj)
        attended = self.backend.attend(qkv, heads, self.cache, inputs)
        return self.kernels.linear(attended, self.o_proj)
