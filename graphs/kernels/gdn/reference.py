"""The gated delta rule in plain torch: one decode step, and the chunked prefill.

Shapes: R requests, T rows, C = 2 * H * K + HV * V conv channels, H key heads of K, HV value
heads of V, W conv taps. `projected` [T, C + HV * V + 2 * HV] has the columns
[conv input | z | b | a]. Pools, both written in place: state_pool [slots, HV, V, K] holds the
recurrent state; conv_pool [slots, W, C] is a ring, the raw conv input of position p sits in
row p % W. The ring has one row more than the window, so that the row of a new position can be
written while others still read the old ones. What lies before position 0 is zero, and a request
whose first row is at position 0 starts from a zero state, whatever its slot holds. Formulas:
Yang et al., "Gated Delta Networks", 2024 (recurrence and chunked form).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.norm.reference import gated_rms_norm

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


def split_projected(projected: Tensor, num_channels: int, num_v_heads: int) -> list[Tensor]:
    """Views of the columns [conv input | z | b | a]."""
    z_columns = projected.shape[1] - num_channels - 2 * num_v_heads
    return list(projected.split([num_channels, z_columns, num_v_heads, num_v_heads], dim=1))


def gdn_decode(
    projected: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
    eps: float,
) -> Tensor:
    """One token for each of R requests; returns the gated, normed output [R, HV * V].

    projected [R, ...], positions and state_slots [R], conv_weight [C, W], a_log and dt_bias
    [HV], norm_weight [V]. Slots must be distinct except for the padding slot. Positions are past
    0 but for padding: a request's first rows are a prefill, and a check here costs a sixth.
    """
    num_channels, num_taps = conv_weight.shape
    num_v_heads, _, head_k_dim = state_pool.shape[1:]
    conv_in, z, b, a = split_projected(projected, num_channels, num_v_heads)
    ages = torch.arange(num_taps - 1, 0, -1, device=positions.device)
    past = positions[:, None] - ages
    window = conv_pool[state_slots[:, None], past % num_taps]
    window = window.masked_fill((past < 0)[..., None], 0.0)
    window = torch.cat([window, conv_in[:, None]], dim=1)
    # From the window, not from conv_in: a write that nothing orders after the gather is compiled
    # into two copies of the whole pool.
    conv_pool[state_slots, positions % num_taps] = window[:, -1]
    mixed = F.silu((window.float() * conv_weight.t().float()).sum(1)).to(projected.dtype)
    q, k, v = split_heads(mixed, num_k_heads, head_k_dim, num_v_heads)
    # Compiled for the CPU, what is stacked gets stored. Else both are normalised anew for every
    # element of the state; stacked along dim 0, the sums below would be a pass of their own.
    q, k = torch.stack([q, k], dim=1).unbind(1)
    g, beta = gate_values(a, b, a_log, dt_bias)
    state = state_pool[state_slots].float()
    state = state * torch.exp(g)[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + delta[..., None] * k[..., None, :]
    state_pool[state_slots] = state.to(state_pool.dtype)
    o = (state * q[..., None, :]).sum(-1).to(projected.dtype)
    return gated_rms_norm(o, z.unflatten(-1, o.shape[1:]), norm_weight, eps).flatten(1)


def conv_prefill(conv_in: Tensor, window: Tensor, conv_weight: Tensor) -> Tensor:
    """Causal depthwise conv and silu over one request's rows, rounded once.

    conv_in [L, C] after window [W - 1, C]; returns the output [L, C].
    """
    num_rows, num_taps = conv_in.shape[0], conv_weight.shape[1]
    extended, weight = torch.cat([window.to(conv_in.dtype), conv_in]).float(), conv_weight.float()
    mixed = extended[:num_rows] * weight[:, 0]
    for tap in range(1, num_taps):
        mixed = mixed + extended[tap : tap + num_rows] * weight[:, tap]
    return F.silu(mixed).to(conv_in.dtype)


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gated delta rule over one request's rows, 64 at a time.

    q, k [L, HV, K], v [L, HV, V], g, beta [L, HV], state [HV, V, K], all fp32; returns
    o [L, HV, V], the states before each chunk [NC, HV, V, K] and the state after the last
    row. Rows added to fill the last chunk have g = beta = 0 and k = 0, so they leave the state
    as it is.
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
    outputs, boundary_states = [], []
    for chunk in range(q.shape[0]):
        boundary_states.append(state)
        v_new = u[chunk] - w[chunk] @ state.transpose(-1, -2)
        outputs.append(q_decayed[chunk] @ state.transpose(-1, -2) + scores[chunk] @ v_new)
        total_decay = decay[chunk, :, -1].exp()[:, None, None]
        state = state * total_decay + v_new.transpose(-1, -2) @ k_decayed[chunk]
    o = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:num_rows]
    return o, torch.stack(boundary_states), state


def read_window(ring: Tensor, position: int) -> Tensor:
    """The W - 1 raw conv inputs before `position`, oldest first, of one slot's ring [W, C]."""
    num_taps = ring.shape[0]
    past = torch.arange(position - num_taps + 1, position, device=ring.device)
    return ring[past % num_taps].masked_fill((past < 0)[:, None], 0.0)


@torch.library.custom_op(
    "deltaloom::gdn_prefill_reference", mutates_args={"conv_pool", "state_pool"}
)
def gdn_prefill(
    projected: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    chunk_starts: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Many tokens for each of R requests: the gated, normed output and the boundary states.

    projected [T, ...], positions [T]; row_starts, chunks and chunk_starts as in
    `graphs.inputs.ForwardInputs`; the weights as in `gdn_decode`. Returns [T, HV * V] and the
    fp32 state before each chunk, [NC, HV, V, K]. Rows past row_starts[-1] and requests without
    rows are padding: they read and write no state, and their output is zero.
    """
    num_channels, num_taps = conv_weight.shape
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    conv_in, z, b, a = split_projected(projected, num_channels, num_v_heads)
    out = projected.new_zeros(projected.shape[0], num_v_heads, head_v_dim)
    states = state_pool.new_zeros((chunks.shape[0], *state_pool.shape[1:]), dtype=torch.float32)
    g, beta = gate_values(a, b, a_log, dt_bias)
    starts, first_chunks = row_starts.tolist(), chunk_starts.tolist()
    for index, slot in enumerate(state_slots.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if rows.start == rows.stop:
            continue
        position = int(positions[rows.start])
        window = read_window(conv_pool[slot], position)
        mixed = conv_prefill(conv_in[rows], window, conv_weight)
        q, k, v = split_heads(mixed, num_k_heads, head_k_dim, num_v_heads)
        state = state_pool[slot].float() if position else torch.zeros_like(state_pool[slot]).float()
        o, before, state = delta_rule_chunked(q, k, v, g[rows], beta[rows], state)
        gate = z[rows].unflatten(-1, (num_v_heads, head_v_dim))
        out[rows] = gated_rms_norm(o.to(out.dtype), gate, norm_weight, eps)
        states[first_chunks[index] : first_chunks[index] + before.shape[0]] = before
        last = slice(max(rows.start, rows.stop - num_taps), rows.stop)
        conv_pool[slot, positions[last] % num_taps] = conv_in[last]
        state_pool[slot] = state.to(state_pool.dtype)
    return out.flatten(1), states


@gdn_prefill.register_fake
def _(
    projected: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
    chunk_starts: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    num_v_heads, head_v_dim = state_pool.shape[1:3]
    out = projected.new_empty(projected.shape[0], num_v_heads * head_v_dim)
    states = state_pool.new_empty((chunks.shape[0], *state_pool.shape[1:]), dtype=torch.float32)
    return out, states
