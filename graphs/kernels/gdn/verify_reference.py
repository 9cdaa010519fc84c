"""The verify step of the gated delta rule and its commit, in plain torch.

Shapes as in `graphs.kernels.gdn.reference` and `graphs.kernels.gdn.stash`. Row r of a request
and the state after it are bitwise what `gdn_decode` gives, called r + 1 times with the same
rows, as long as neither is compiled: compiled code picks other vectors for the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from graphs.kernels.gdn.reference import gate_values, split_heads, split_projected
from graphs.kernels.gdn.stash import VerifyStash
from graphs.kernels.norm.reference import gated_rms_norm


def causal_conv1d_verify(conv_in: Tensor, past: Tensor, conv_weight: Tensor) -> list[Tensor]:
    """Conv and silu of the rows [R, rows, C], each row [R, C] by itself as decode computes it.

    past [R, W - 1, C] are the raw inputs before the first row, conv_weight [C, W].
    """
    num_rows, num_taps = conv_in.shape[1], conv_weight.shape[1]
    extended = torch.cat([past, conv_in], dim=1)
    weight = conv_weight.t().float()
    windows = [extended[:, row : row + num_taps].contiguous() for row in range(num_rows)]
    return [F.silu((window.float() * weight).sum(1)).to(conv_in.dtype) for window in windows]


def advance_state(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One row of the recurrence as decode has it, fp32: state [..., HV, V, K] -> new state.

    k [..., HV, K], v [..., HV, V], decay and beta [..., HV].
    """
    state = state * decay[..., None, None]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    return state + delta[..., None] * k[..., None, :]


@torch.library.custom_op("deltaloom::store_state", mutates_args=())
def store_state(state: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 state as a pool of that dtype stores it.

    An op of its own: compiled, a rounding whose result is read as fp32 at once is left out.
    """
    return state.to(dtype, copy=True)


@store_state.register_fake
def _(state: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(state, dtype=dtype)


def gdn_verify(
    projected: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    stash_conv_in: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    stash_decay: Tensor,
    stash_beta: Tensor,
    num_k_heads: int,
    eps: float,
    rows_per_request: int,
) -> Tensor:
    """rows_per_request tokens of each of R requests; returns the gated, normed output.

    Each row's arithmetic has the shapes of one decode step: what vectors a function is computed
    in decides its last bit.

    projected [R * rows, ...] and positions [R * rows], a request's rows one after the other from
    the position of its first; state_slots [R]; the weights as in `gdn_decode`. Positions are past
    0 but for padding, as there. Both pools are only read. The stash [R', rows', ...] of this
    layer, R' >= R and rows' >= rows, takes what `gdn_commit` needs. Output [R * rows, HV * V],
    zeros where the slot is the padding slot 0.
    """
    num_channels, num_taps = conv_weight.shape
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    num_requests, rows = state_slots.shape[0], rows_per_request
    key_dim = num_k_heads * head_k_dim
    starts = positions.unflatten(0, (num_requests, rows))[:, 0]
    parts = split_projected(projected, num_channels, num_v_heads)
    conv_in, z, b, a = (part.unflatten(0, (num_requests, rows)) for part in parts)
    past = starts[:, None] - torch.arange(num_taps - 1, 0, -1, device=positions.device)
    window = conv_pool[state_slots[:, None], past % num_taps]
    window = window.masked_fill((past < 0)[..., None], 0.0)
    mixed_rows = causal_conv1d_verify(conv_in, window, conv_weight)
    state = state_pool[state_slots]
    outputs, decays, betas = [], [], []
    for row, mixed in enumerate(mixed_rows):
        q, k, v = split_heads(mixed, num_k_heads, head_k_dim, num_v_heads)
        q, k = torch.stack([q, k], dim=1).unbind(1)
        g, beta = gate_values(a[:, row], b[:, row], a_log, dt_bias)
        decay = torch.exp(g)
        advanced = advance_state(state.float(), k, v, decay, beta)
        o = (advanced * q[..., None, :]).sum(-1).to(projected.dtype)
        gate = z[:, row].unflatten(-1, o.shape[1:])
        outputs.append(gated_rms_norm(o, gate, norm_weight, eps).flatten(1))
        decays.append(decay)
        betas.append(beta)
        is_exact = state_pool.dtype is torch.float32
        state = advanced if is_exact else store_state(advanced, state_pool.dtype)
    _, k_rows, v_rows = torch.stack(mixed_rows, dim=1).split(
        [key_dim, key_dim, num_v_heads * head_v_dim], dim=2
    )
    stash = VerifyStash(stash_conv_in, stash_k, stash_v, stash_decay, stash_beta)
    new = VerifyStash(conv_in, k_rows, v_rows, torch.stack(decays, 1), torch.stack(betas, 1))
    is_real = (state_slots != 0)[:, None, None]
    for tensor, values in zip(stash, new, strict=True):
        kept = tensor[:num_requests, :rows]
        kept.copy_(torch.where(is_real, values, kept))
    return torch.stack(outputs, dim=1).masked_fill(~is_real, 0.0).flatten(0, 1)


def gdn_commit(
    stash_conv_in: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    stash_decay: Tensor,
    stash_beta: Tensor,
    positions: Tensor,
    num_committed: Tensor,
    state_slots: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
) -> None:
    """Advance R requests by the first rows of the stash [L, R', rows, ...], in all layers.

    positions [R] of each request's first stashed row, num_committed [R] in 0..rows, state_slots
    [R]; pools of all layers, conv_pool [L, slots, W, C] and state_pool [L, slots, HV, V, K].
    Requests without committed rows, or in the padding slot 0, change nothing. Positions are past
    0 but for padding, as in `gdn_decode`.
    """
    num_requests, rows, num_taps = state_slots.shape[0], stash_k.shape[2], conv_pool.shape[2]
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[2:]
    num_committed = num_committed.masked_fill(state_slots == 0, 0)
    ring = conv_pool[:, state_slots]
    ring_rows = torch.arange(num_taps, device=positions.device)
    state = state_pool[:, state_slots]
    for row in range(rows):
        is_row = row < num_committed
        is_kept = is_row[:, None] & ((positions[:, None] + row) % num_taps == ring_rows)
        conv_in = stash_conv_in[:, :num_requests, row, None]
        ring = torch.where(is_kept[..., None], conv_in, ring)
        k = stash_k[:, :num_requests, row].unflatten(-1, (num_k_heads, head_k_dim)).float()
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(num_v_heads // num_k_heads, dim=2)
        v = stash_v[:, :num_requests, row].unflatten(-1, (num_v_heads, head_v_dim)).float()
        decay, beta = stash_decay[:, :num_requests, row], stash_beta[:, :num_requests, row]
        advanced = advance_state(state.float(), k, v, decay, beta)
        if state.dtype is not torch.float32:
            advanced = store_state(advanced, state.dtype)
        state = torch.where(is_row[:, None, None, None], advanced, state)
    conv_pool[:, state_slots] = ring
    state_pool[:, state_slots] = state
