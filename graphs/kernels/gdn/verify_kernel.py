"""The rows of a verify step per request: decode's arithmetic, on a state kept in registers.

Neither pool is written; what the commit needs goes to the stash. Bitwise equal to stepwise
decode for every state dtype: see `advance_state`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
# ruff: noqa: RUF005  (Triton adds tuples, but unpacks none)

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.gdn.decode_kernel import (
    advance_state,
    gated_norm,
    load_state_rows,
    unit_length,
)
from graphs.kernels.gdn.gate_kernel import log_gates


@triton.jit
def load_rows(rows_ptr, row_stride, offsets, mask, ROWS: tl.constexpr):
    """A tuple of ROWS loads, zero where masked."""
    rows = ()
    for row in tl.static_range(ROWS):
        rows = rows + (tl.load(rows_ptr + row * row_stride + offsets, mask=mask, other=0.0),)
    return rows


@triton.jit
def causal_conv1d_verify(
    first_row_ptr,
    row_stride,
    conv_weight_ptr,
    ring_ptr,
    position,
    channels,
    is_channel,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Conv and silu of some channels of ROWS rows, the first at `position`.

    Returns a tuple of raw inputs, the NUM_TAPS - 1 before the first row and then the rows', and
    a tuple of the rows' outputs in the model dtype. Each row as `conv_channels` has it, but what
    lies before it may be a row of this step, which is not in the ring yet.
    """
    raw = ()
    for age in tl.static_range(NUM_TAPS - 1, 0, -1):
        ring_row = (position - age + NUM_TAPS) % NUM_TAPS
        is_past = is_channel & (position >= age)
        past_ptr = ring_ptr + ring_row * NUM_CHANNELS
        raw = raw + (tl.load(past_ptr + channels, mask=is_past, other=0.0),)
    raw = raw + load_rows(first_row_ptr, row_stride, channels, is_channel, ROWS)
    weights = conv_weight_ptr + channels * NUM_TAPS
    mixed = ()
    for row in tl.static_range(ROWS):
        last_weight = tl.load(weights + NUM_TAPS - 1, mask=is_channel, other=0.0)
        total = raw[NUM_TAPS - 1 + row].to(tl.float32) * last_weight.to(tl.float32)
        for age in tl.static_range(1, NUM_TAPS):
            weight = tl.load(weights + NUM_TAPS - 1 - age, mask=is_channel, other=0.0)
            past = raw[NUM_TAPS - 1 + row - age].to(tl.float32)
            total = tl.fma(past, weight.to(tl.float32), total)
        mixed = mixed + ((total * tl.sigmoid(total)).to(raw[NUM_TAPS - 1].dtype),)
    return raw, mixed


@triton.jit
def store_rows(
    rows_ptr,
    values,
    offsets,
    mask,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write values[FIRST:FIRST + ROWS] to rows of WIDTH elements."""
    for row in tl.static_range(ROWS):
        tl.store(rows_ptr + row * WIDTH + offsets, values[FIRST + row], mask=mask)


@triton.jit
def store_zero_rows(rows_ptr, offsets, mask, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Zero rows of WIDTH elements."""
    for row in tl.static_range(ROWS):
        tl.store(rows_ptr + row * WIDTH + offsets, tl.zeros_like(offsets).to(tl.float32), mask=mask)


@triton.jit
def load_gates(
    gates_ptr,
    row_stride,
    v_head,
    a_log_ptr,
    dt_bias_ptr,
    HV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decay and write strength of the rows, two tuples of scalars."""
    decays, betas = (), ()
    for row in tl.static_range(ROWS):
        row_ptr = gates_ptr + row * row_stride
        log_decay, beta = log_gates(
            tl.load(row_ptr + HV + v_head),
            tl.load(row_ptr + v_head),
            tl.load(a_log_ptr + v_head),
            tl.load(dt_bias_ptr + v_head),
        )
        decays, betas = decays + (tl.exp(log_decay),), betas + (beta,)
    return decays, betas


@triton.jit
def gdn_verify_kernel(
    projected_ptr,
    positions_ptr,
    state_slots_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    conv_pool_ptr,
    state_pool_ptr,
    conv_in_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    out_ptr,
    projected_stride,
    conv_slot_stride,
    state_slot_stride,
    EPS: tl.constexpr,
    Q_SCALE: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    STASH_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_V_BLOCKS: tl.constexpr,
):
    """Program (request, value head). Pools as in `gdn_decode_kernel`; stash [R, rows, ...]."""
    request = (tl.program_id(0) // HV).to(tl.int64)
    v_head = tl.program_id(0) % HV
    NUM_CHANNELS: tl.constexpr = 2 * H * K + HV * V
    slot = tl.load(state_slots_ptr + request)
    blocks = tl.arange(0, NUM_V_BLOCKS)
    v_dims = blocks[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    is_v = v_dims < V
    v_offsets = v_head * V + v_dims
    out_ptr += request * ROWS * (HV * V)
    if slot == 0:
        store_zero_rows(out_ptr, v_offsets, is_v, HV * V, ROWS)
        return
    position = tl.load(positions_ptr + request * ROWS).to(tl.int32)
    k_offsets = tl.arange(0, BLOCK_K)
    is_k = k_offsets < K
    state_ptr = state_pool_ptr + slot * state_slot_stride + v_head * (V * K)
    ring_ptr = conv_pool_ptr + slot * conv_slot_stride
    row_ptr = projected_ptr + request * ROWS * projected_stride
    q_channels = v_head // (HV // H) * K + k_offsets
    # On its way while the conv is computed.
    stored = load_state_rows(state_ptr, 0, position > 0, K, V, BLOCK_K, BLOCK_V)
    raw_q, mixed_q = causal_conv1d_verify(
        row_ptr, projected_stride, conv_weight_ptr, ring_ptr, position,
        q_channels, is_k, NUM_CHANNELS, NUM_TAPS, ROWS,
    )  # fmt: skip
    raw_k, mixed_k = causal_conv1d_verify(
        row_ptr, projected_stride, conv_weight_ptr, ring_ptr, position,
        H * K + q_channels, is_k, NUM_CHANNELS, NUM_TAPS, ROWS,
    )  # fmt: skip
    raw_v, mixed_v = causal_conv1d_verify(
        row_ptr, projected_stride, conv_weight_ptr, ring_ptr, position,
        2 * H * K + v_offsets, is_v, NUM_CHANNELS, NUM_TAPS, ROWS,
    )  # fmt: skip
    gates_ptr = row_ptr + NUM_CHANNELS + HV * V
    decays, betas = load_gates(
        gates_ptr, projected_stride, v_head, a_log_ptr, dt_bias_ptr, HV, ROWS
    )
    # Before the first store, which no later load can pass.
    zs = load_rows(row_ptr + NUM_CHANNELS, projected_stride, v_offsets, is_v, ROWS)
    norm_weight = tl.load(norm_weight_ptr + v_dims, mask=is_v, other=0.0)
    stash_row = request * STASH_ROWS
    conv_in_ptr += stash_row * NUM_CHANNELS
    owns_qk = is_k & (v_head % (HV // H) == 0)
    FIRST: tl.constexpr = NUM_TAPS - 1
    store_rows(conv_in_ptr, raw_q, q_channels, owns_qk, NUM_CHANNELS, FIRST, ROWS)
    store_rows(conv_in_ptr, raw_k, H * K + q_channels, owns_qk, NUM_CHANNELS, FIRST, ROWS)
    store_rows(conv_in_ptr, raw_v, 2 * H * K + v_offsets, is_v, NUM_CHANNELS, FIRST, ROWS)
    store_rows(k_ptr + stash_row * (H * K), mixed_k, q_channels, owns_qk, H * K, 0, ROWS)
    store_rows(v_ptr + stash_row * (HV * V), mixed_v, v_offsets, is_v, HV * V, 0, ROWS)
    store_rows(decay_ptr + stash_row * HV, decays, v_head, True, HV, 0, ROWS)
    store_rows(beta_ptr + stash_row * HV, betas, v_head, True, HV, 0, ROWS)
    qs, ks, outs = (), (), ()
    for row in tl.static_range(ROWS):
        qs = qs + (unit_length(mixed_q[row]) * Q_SCALE,)
        ks = ks + (unit_length(mixed_k[row]),)
        outs = outs + (tl.zeros([NUM_V_BLOCKS, BLOCK_V], tl.float32),)
    # A loop at run time: unrolled, its code is 60 KB longer and comes from memory in every layer.
    for block in tl.range(0, NUM_V_BLOCKS, num_stages=1):
        following = load_state_rows(state_ptr, block + 1, position > 0, K, V, BLOCK_K, BLOCK_V)
        state = stored.to(tl.float32)
        advanced = ()
        for row in tl.static_range(ROWS):
            v = mixed_v[row].to(tl.float32)
            block_v = tl.sum(tl.where(blocks[:, None] == block, v, 0.0), axis=0)
            state, block_o = advance_state(
                state, qs[row], ks[row], block_v, decays[row], betas[row]
            )
            # What decode would have stored, and read again for its next row.
            state = state.to(stored.dtype).to(tl.float32)
            o = tl.where(blocks[:, None] == block, block_o[None, :], outs[row])
            advanced = advanced + (o,)
        outs, stored = advanced, following
    for row in tl.static_range(ROWS):
        y = gated_norm(outs[row], zs[row], norm_weight, EPS, V)
        tl.store(out_ptr + row * (HV * V) + v_offsets, y, mask=is_v)
