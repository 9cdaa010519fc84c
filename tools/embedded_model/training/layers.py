"""The layers of the model. Parameter names are the checkpoint's tensor names.

Shapes: B rows, T tokens, H hidden size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.embedded_model.training.config import ModelConfig
from tools.embedded_model.training.gdn import DeltaRule

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root mean square norm whose weight is an offset from one."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension in float32."""
        return (_unit_rms(x, self.eps) * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(nn.Module):
    """Root mean square norm, then a SiLU gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize the last dimension of x in float32 and gate it."""
        return (self.weight.float() * _unit_rms(x, self.eps) * F.silu(gate.float())).type_as(x)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class GatedDeltaNet(nn.Module):
    """Short convolution, gated delta rule, gated norm."""

    def __init__(self, config: ModelConfig, rule: DeltaRule) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.rule = rule
        self.num_key_heads, self.key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.num_value_heads = config.linear_num_value_heads
        self.value_dim = config.linear_value_head_dim
        self.window = config.linear_conv_kernel_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.widths = [keys, keys, values]
        width = sum(self.widths)
        self.in_proj_qkv = nn.Linear(hidden, width, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(width, width, self.window, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads).uniform_(0.5, 8).log())
        # Time steps of 0.001 to 0.1, as the inverse of the softplus in forward.
        steps = torch.empty(self.num_value_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = GatedNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, _rotary: Rotary) -> Tensor:
        """[B,T,H] -> [B,T,H], causal from the first token."""
        B, T, _ = x.shape
        q, k, v = self._convolved(self.in_proj_qkv(x)).split(self.widths, -1)
        beta = self.in_proj_b(x).float().sigmoid()
        steps = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        output = self.rule(
            q.reshape(B, T, self.num_key_heads, self.key_dim),
            k.reshape(B, T, self.num_key_heads, self.key_dim),
            v.reshape(B, T, self.num_value_heads, self.value_dim),
            -self.A_log.float().exp() * steps,
            beta,
        )
        gate = self.in_proj_z(x).reshape(B, T, self.num_value_heads, self.value_dim)
        return self.out_proj(self.norm(output, gate).reshape(B, T, -1))

    def _convolved(self, x: Tensor) -> Tensor:
        """The depthwise causal convolution as a sum, which compiles into one kernel."""
        T = x.shape[1]
        weight = self.conv1d.weight.squeeze(1).to(x.dtype)
        padded = F.pad(x, (0, 0, self.window - 1, 0))
        return F.silu(sum(padded[:, j : j + T] * weight[:, j] for j in range(self.window)))


class Attention(nn.Module):
    """Grouped-query attention with normalized, partly rotated heads and an output gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_kv_heads = num_kv_heads
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotary_dim = config.rotary_dim

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[B,T,H] -> [B,T,H], causal; rotary is (cos, sin) of [T, rotary_dim]."""
        B, T, _ = x.shape
        kv_shape = (B, T, self.num_kv_heads, self.head_dim)
        q, gate = self.q_proj(x).view(B, T, self.num_heads, -1).chunk(2, -1)
        k, v = self.k_proj(x).view(kv_shape), self.v_proj(x).view(kv_shape)
        q = self._rotate(self.q_norm(q).transpose(1, 2), rotary)
        k = self._rotate(self.k_norm(k).transpose(1, 2), rotary)
        output = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        gated = output.transpose(1, 2).reshape(B, T, -1) * torch.sigmoid(gate.reshape(B, T, -1))
        return self.o_proj(gated)

    def _rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        cos, sin = rotary
        rotated, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return torch.cat([rotated * cos + turned * sin, rest], -1).type_as(x)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,H] -> [B,T,H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Token mixer and MLP, each on a normalized residual."""

    def __init__(self, config: ModelConfig, rule: DeltaRule, is_full_attention: bool) -> None:
        super().__init__()
        self.is_full_attention = is_full_attention
        if is_full_attention:
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config, rule)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[B,T,H] -> [B,T,H]."""
        mixer = self.self_attn if self.is_full_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))
