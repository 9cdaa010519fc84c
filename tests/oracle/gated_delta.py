"""The gated delta rule and causal attention over whole sequences, written from the formulas.

fp64 throughout; knows no pools, pages, slots or chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gdn_sequence(
    conv_in: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One request from its first token: outputs [T, HV, V], last state [HV, V, K], last window.

    conv_in [T, C], a and b [T, HV], conv_weight [C, W].
    """
    conv_in, a, b, conv_weight, a_log, dt_bias = (
        x.double() for x in (conv_in, a, b, conv_weight, a_log, dt_bias)
    )
    num_rows, num_taps, num_v_heads = conv_in.shape[0], conv_weight.shape[1], a.shape[1]
    past = torch.zeros(num_taps - 1, conv_in.shape[1], dtype=torch.float64)
    extended = torch.cat([past, conv_in])
    key_dim = num_k_heads * head_k_dim
    head_v_dim = (conv_in.shape[1] - 2 * key_dim) // num_v_heads
    state = torch.zeros(num_v_heads, head_v_dim, head_k_dim, dtype=torch.float64)
    outputs = torch.zeros(num_rows, num_v_heads, head_v_dim, dtype=torch.float64)
    for row in range(num_rows):
        taps = extended[row : row + num_taps].t()
        mixed = (taps * conv_weight).sum(1)
        mixed = mixed * torch.sigmoid(mixed)
        for head in range(num_v_heads):
            k_head = head // (num_v_heads // num_k_heads)
            q = mixed[k_head * head_k_dim : (k_head + 1) * head_k_dim]
            k = mixed[key_dim + k_head * head_k_dim : key_dim + (k_head + 1) * head_k_dim]
            v = mixed[2 * key_dim + head * head_v_dim : 2 * key_dim + (head + 1) * head_v_dim]
            q = q / (q.square().sum() + 1e-6).sqrt() / head_k_dim**0.5
            k = k / (k.square().sum() + 1e-6).sqrt()
            decay = torch.exp(
                -a_log[head].exp() * torch.log1p((a[row, head] + dt_bias[head]).exp())
            )
            beta = 1.0 / (1.0 + torch.exp(-b[row, head]))
            kept = state[head] * decay
            state[head] = kept + torch.outer(beta * (v - kept @ k), k)
            outputs[row, head] = state[head] @ q
    return outputs, state, extended[num_rows:]


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dim with a plain weight, times silu(z); o and z [T, HV, V]."""
    o, z = o.double(), z.double()
    scaled = o / (o.square().mean(-1, keepdim=True) + eps).sqrt()
    return weight.double() * scaled * z * torch.sigmoid(z)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, HQ, D] are the last T of S positions, k and v [S, H, D]; returns [T, HQ, D]."""
    num_rows, num_q_heads, head_dim = q.shape
    num_context, num_kv_heads = k.shape[:2]
    outputs = torch.zeros_like(q, dtype=torch.float64)
    for row in range(num_rows):
        visible = num_context - num_rows + row + 1
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            scores = k[:visible, kv_head].double() @ q[row, head].double() / head_dim**0.5
            outputs[row, head] = scores.softmax(0) @ v[:visible, kv_head].double()
    return outputs
