"""Full attention with per-head q/k norm, partial rotary embedding and an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.protocol import AttentionBackend, RowCapabilities
from engine.cache.pools import KvLayer
from engine.layers.parameter import empty_weight
from engine.model_config import ModelConfig
from graphs.inputs import ForwardInputs
from graphs.kernels.attention.reference import rotate
from graphs.kernels.linear.reference import linear
from graphs.kernels.norm.reference import rms_norm


class AttentionMixer(nn.Module):
    """Keys and values live in the pages of `cache`.

    `qkv_proj` has the rows [per query head: q, gate | k | v].
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KvLayer,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_q_heads, self.num_kv_heads = config.num_q_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.cache, self.backend = cache, backend
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
        q_gate, k, v = linear(x, self.qkv_proj).split(self.sizes, dim=-1)
        q, gate = q_gate.unflatten(-1, (self.num_q_heads, 2, self.head_dim)).unbind(2)
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        inv_freq = self.get_buffer("inv_freq")
        q = rotate(rms_norm(q, self.q_norm, self.eps), inputs.positions, inv_freq)
        k = rotate(rms_norm(k, self.k_norm, self.eps), inputs.positions, inv_freq)
        attended = self.backend.attend(q, k, v, self.cache, inputs)
        return linear((attended * torch.sigmoid(gate)).flatten(1), self.o_proj)
