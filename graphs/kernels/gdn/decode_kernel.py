"""One token of the gated delta rule per request, from conv window to gated norm."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.gdn.gate_kernel import log_gates


@triton.jit
def conv_channels(
    projected_row_ptr,
    conv_weight_ptr,
    ring_ptr,
    position,
    channels,
    is_channel,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
):
    """Conv and silu of some channels at `position`: raw input, and output in the model dtype."""
    raw = tl.load(projected_row_ptr + channels, mask=is_channel, other=0.0)
    weights = conv_weight_ptr + channels * NUM_TAPS
    last_weight = tl.load(weights + NUM_TAPS - 1, mask=is_channel, other=0.0)
    total = raw.to(tl.float32) * last_weight.to(tl.float32)
    for age in tl.static_range(1, NUM_TAPS):
        row = (position - age + NUM_TAPS) % NUM_TAPS
        is_past = is_channel & (position >= age)
        past = tl.load(ring_ptr + row * NUM_CHANNELS + channels, mask=is_past, other=0.0)
        weight = tl.load(weights + NUM_TAPS - 1 - age, mask=is_channel, other=0.0)
        total = tl.fma(past.to(tl.float32), weight.to(tl.float32), total)
    return raw, (total * tl.sigmoid(total)).to(raw.dtype)


@triton.jit
def unit_length(x):
    """x over its length, eps 1e-6 inside the root; fp32."""
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def advance_state(state, q, k, v, decay, beta):
    """One row of the recurrence on rows of V: state [BV, K] fp32 -> new state and o [BV].

    Decode, verify and replay call this with the same BV and num_warps, so that they agree in
    every bit: nothing else may update a state, and a multiply-add is written as one.
    """
    state = state * decay
    delta = beta * (v - tl.sum(state * k[None, :], axis=1))
    state = tl.fma(delta[:, None], k[None, :], state)
    return state, tl.sum(state * q[None, :], axis=1)


@triton.jit
def load_state_rows(
    state_ptr,
    block,
    is_kept,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A block of rows of one head's state [BLOCK_V, BLOCK_K], as stored; zero unless is_kept."""
    rows = block * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    is_tile = (rows < V)[:, None] & (columns < K)[None, :] & is_kept
    return tl.load(state_ptr + rows[:, None] * K + columns[None, :], mask=is_tile, other=0.0)


@triton.jit
def gdn_decode_kernel(
    projected_ptr,
    positions_ptr,
    state_slots_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    conv_pool_ptr,
    state_pool_ptr,
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_V_BLOCKS: tl.constexpr,
):
    """Program (request, value head). State [slot, HV, V, K], conv ring [slot, NUM_TAPS, C]."""
    request = tl.program_id(0) // HV
    v_head = tl.program_id(0) % HV
    NUM_CHANNELS: tl.constexpr = 2 * H * K + HV * V
    slot = tl.load(state_slots_ptr + request)
    # Rows of V in blocks: [NUM_V_BLOCKS, BLOCK_V].
    blocks = tl.arange(0, NUM_V_BLOCKS)
    v_offsets = blocks[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    is_v = v_offsets < V
    out_offsets = (request * HV + v_head) * V + v_offsets
    if slot == 0:
        tl.store(out_ptr + out_offsets, tl.zeros_like(v_offsets).to(tl.float32), mask=is_v)
        return
    position = tl.load(positions_ptr + request).to(tl.int32)
    k_offsets = tl.arange(0, BLOCK_K)
    is_k = k_offsets < K
    state_ptr = state_pool_ptr + slot * state_slot_stride + v_head * (V * K)
    ring_ptr = conv_pool_ptr + slot * conv_slot_stride
    row_ptr = projected_ptr + request.to(tl.int64) * projected_stride
    k_head = v_head // (HV // H)
    q_channels = k_head * K + k_offsets
    k_channels = H * K + q_channels
    v_channels = 2 * H * K + v_head * V + v_offsets
    # On its way while the conv is computed.
    stored = load_state_rows(state_ptr, 0, position > 0, K, V, BLOCK_K, BLOCK_V)
    raw_q, q = conv_channels(
        row_ptr, conv_weight_ptr, ring_ptr, position, q_channels, is_k, NUM_CHANNELS, NUM_TAPS
    )
    raw_k, k = conv_channels(
        row_ptr, conv_weight_ptr, ring_ptr, position, k_channels, is_k, NUM_CHANNELS, NUM_TAPS
    )
    raw_v, v = conv_channels(
        row_ptr, conv_weight_ptr, ring_ptr, position, v_channels, is_v, NUM_CHANNELS, NUM_TAPS
    )
    # Before the first store, which no later load can pass.
    gate_row_ptr = row_ptr + NUM_CHANNELS + HV * V
    log_decay, beta = log_gates(
        tl.load(gate_row_ptr + HV + v_head),
        tl.load(gate_row_ptr + v_head),
        tl.load(a_log_ptr + v_head),
        tl.load(dt_bias_ptr + v_head),
    )
    decay = tl.exp(log_decay)
    z = tl.load(row_ptr + NUM_CHANNELS + v_head * V + v_offsets, mask=is_v, other=0.0)
    norm_weight = tl.load(norm_weight_ptr + v_offsets, mask=is_v, other=0.0)
    # The new row of the ring is none of the rows that any program of this request reads.
    new_row_ptr = ring_ptr + (position % NUM_TAPS) * NUM_CHANNELS
    owns_qk = v_head % (HV // H) == 0
    tl.store(new_row_ptr + q_channels, raw_q, mask=is_k & owns_qk)
    tl.store(new_row_ptr + k_channels, raw_k, mask=is_k & owns_qk)
    tl.store(new_row_ptr + v_channels, raw_v, mask=is_v)
    q, k, v = unit_length(q) * Q_SCALE, unit_length(k), v.to(tl.float32)
    o = tl.zeros([NUM_V_BLOCKS, BLOCK_V], tl.float32)
    # A loop at run time, as in the verify kernel: unrolled, its code is twice as long.
    for block in tl.range(0, NUM_V_BLOCKS, num_stages=1):
        # A load cannot pass the store before it by itself: they might be of the same rows.
        following = load_state_rows(state_ptr, block + 1, position > 0, K, V, BLOCK_K, BLOCK_V)
        block_v = tl.sum(tl.where(blocks[:, None] == block, v, 0.0), axis=0)
        state, block_o = advance_state(stored.to(tl.float32), q, k, block_v, decay, beta)
        rows = block * BLOCK_V + tl.arange(0, BLOCK_V)
        tile_ptrs = state_ptr + rows[:, None] * K + k_offsets[None, :]
        tl.store(tile_ptrs, state.to(stored.dtype), mask=(rows < V)[:, None] & is_k[None, :])
        o = tl.where(blocks[:, None] == block, block_o[None, :], o)
        stored = following
    y = gated_norm(o, z, norm_weight, EPS, V)
    tl.store(out_ptr + out_offsets, y, mask=is_v)


@triton.jit
def gated_norm(o, z, norm_weight, EPS: tl.constexpr, V: tl.constexpr):
    """RMS norm of all V values of o (zero where masked), times weight and silu(z); fp32."""
    mean_square = tl.sum(tl.sum(o * o, axis=1), axis=0) / V
    z = z.to(tl.float32)
    return o * tl.rsqrt(mean_square + EPS) * norm_weight.to(tl.float32) * z * tl.sigmoid(z)
