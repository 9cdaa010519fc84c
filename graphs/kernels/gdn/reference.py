"""The gated delta rule in plain torch: one decode step, and the chunked prefill.

Shapes: R requests, T rows, C = 2 * H * K + HV * V conv channels, H key heads of K, HV value
heads of V, W conv taps. Pools: conv_pool [slots, W - 1, C] holds the last raw conv inputs,
oldest first; state_pool [slots, HV, V, K] holds the recurrent state. Both are written in
place. Formulas: Yang et al., "Gated Delta Networks", 2024 (recurrence and chunked form).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64


def gate_values(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay -exp(A_log) softplus(a + dt_bias) and write strength sigmoid(b), both fp32."""
    g = -torch.exp(a_log.float()) * F.softplus(a.float() + dt_bias.float())
    return g, torch.sigmoid(b).float()


def split_heads(
    mixed: Tensor, num_k_heads: int, head_k_dim: int, num_v_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split conv output [N, C] into normalised q, k [N, HV, K] and v [N, HV, V], all fp32.

    q and k have unit length (eps inside the root), q is scaled by K^-0.5; each key head
    serves HV / H value heads.
    """
    num_rows = mixed.shape[0]
    key_dim = num_k_heads * head_k_dim
    q, k, v = mixed.float().split([key_dim, key_dim, mixed.shape[1] - 2 * key_dim], dim=1)
    q = q.view(num_rows, num_k_heads, head_k_dim)
    k = k.view(num_rows, num_k_heads, head_k_dim)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * head_k_dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    repeats = num_v_heads // num_k_heads
    return (
        q.repeat_interleave(repeats, dim=1),
        k.repeat_interleave(repeats, dim=1),
        v.view(num_rows, num_v_heads, -1),
    )


def gdn_decode(
    conv_in: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_slots: Tensor,
    num_k_heads: int,
) -> Tensor:
    """One token for each of R requests; returns o [R, HV, V] in conv_in's dtype.

    conv_in [R, C], a and b [R, HV], conv_weight [C, W]. Slots must be distinct except for
    the padding slot.
    """
    num_v_heads, head_k_dim = state_pool.shape[1], state_pool.shape[3]
    window = torch.cat([conv_pool[state_slots], conv_in[:, None]], dim=1)
    conv_pool[state_slots] = window[:, 1:]
    mixed = F.silu((window * conv_weight.t()).sum(1))
    q, k, v = split_heads(mixed, num_k_heads, head_k_dim, num_v_heads)
    g, beta = gate_values(a, b, a_log, dt_bias)
    state = state_pool[state_slots].float() * torch.exp(g)[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + delta[..., None] * k[..., None, :]
    state_pool[state_slots] = state.to(state_pool.dtype)
    return (state * q[..., None, :]).sum(-1).to(conv_in.dtype)


def conv_prefill(conv_in: Tensor, window: Tensor, conv_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise conv and silu over one request's rows.

    conv_in [L, C] after window [W - 1, C]; returns the output [L, C] and the new window.
    """
    num_rows, num_taps = conv_in.shape[0], conv_weight.shape[1]
    extended = torch.cat([window.to(conv_in.dtype), conv_in])
    mixed = extended[:num_rows] * conv_weight[:, 0]
    for tap in range(1, num_taps):
        mixed = mixed + extended[tap : tap + num_rows] * conv_weight[:, tap]
    return F.silu(mixed), extended[num_rows:]


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over one request's rows, 64 at a time.

    q, k [L, HV, K], v [L, HV, V], g, beta [L, HV], state [HV, V, K], all fp32; returns
    o [L, HV, V] and the state after the last row. Rows added to fill the last chunk have
    g = beta = 0 and k = 0, so they leave the state as it is.
    """
    num_rows = q.shape[0]
    padding = -num_rows % CHUNK
    q, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, CHUNK)).transpose(1, 2)
        for x in (q, k, v)
    )  # [NC, HV, 64, D]
    g, beta = (
        F.pad(x, (0, 0, 0, padding)).unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in (g, beta)
    )  # [NC, HV, 64]
    decay = g.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    pair_decay = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * pair_decay
    rhs = torch.cat([v * beta[..., None], k_beta * decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = (q @ k.transpose(-1, -2)) * pair_decay
    q_decayed = q * decay.exp()[..., None]
    k_decayed = k * (decay[..., -1:] - decay).exp()[..., None]
    outputs = []
    for chunk in range(q.shape[0]):
        v_new = u[chunk] - w[chunk] @ state.transpose(-1, -2)
        outputs.append(q_decayed[chunk] @ state.transpose(-1, -2) + scores[chunk] @ v_new)
        total_decay = decay[chunk, :, -1].exp()[:, None, None]
        state = state * total_decay + v_new.transpose(-1, -2) @ k_decayed[chunk]
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:num_rows], state


@torch.library.custom_op(
    "deltaloom::gdn_prefill_reference", mutates_args={"conv_pool", "state_pool"}
)
def gdn_prefill(
    conv_in: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_slots: Tensor,
    row_starts: Tensor,
    is_fresh: Tensor,
    num_k_heads: int,
) -> Tensor:
    """Many tokens for each of R requests; returns o [T, HV, V] in conv_in's dtype.

    conv_in [T, C], a and b [T, HV]. row_starts [R + 1] and is_fresh [R] are on the CPU. Rows
    past row_starts[-1] are padding: they read no state, and their output is zero. A request
    without rows is padding too.
    """
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    out = conv_in.new_zeros(conv_in.shape[0], num_v_heads, head_v_dim)
    g, beta = gate_values(a, b, a_log, dt_bias)
    starts = row_starts.tolist()
    for index, (slot, fresh) in enumerate(
        zip(state_slots.tolist(), is_fresh.tolist(), strict=True)
    ):
        rows = slice(starts[index], starts[index + 1])
        if rows.start == rows.stop:
            continue
        window, state = conv_pool[slot], state_pool[slot].float()
        if fresh:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        mixed, window = conv_prefill(conv_in[rows], window, conv_weight)
        q, k, v = split_heads(mixed, num_k_heads, head_k_dim, num_v_heads)
        o, state = delta_rule_chunked(q, k, v, g[rows], beta[rows], state)
        out[rows] = o.to(out.dtype)
        conv_pool[slot] = window
        state_pool[slot] = state.to(state_pool.dtype)
    return out


@gdn_prefill.register_fake
def _(
    conv_in: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_slots: Tensor,
    row_starts: Tensor,
    is_fresh: Tensor,
    num_k_heads: int,
) -> Tensor:
    return conv_in.new_empty(conv_in.shape[0], state_pool.shape[1], state_pool.shape[2])
