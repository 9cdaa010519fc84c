"""The state from chunk to chunk, in order: the only sequential part of a prefill."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_ring(
    projected_ptr,
    ring_ptr,
    position,
    num_rows,
    first_channel,
    projected_stride,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Put the last rows' raw conv inputs in the ring, where their positions say.

    projected_ptr is the request's first row, at `position`. Some BLOCK_C channels only.
    """
    channels = first_channel + tl.arange(0, BLOCK_C)
    for age in tl.static_range(1, NUM_TAPS + 1):
        row = num_rows - age
        is_row = (channels < NUM_CHANNELS) & (row >= 0)
        raw = tl.load(projected_ptr + row.to(tl.int64) * projected_stride + channels, mask=is_row)
        # Not the remainder of a negative number: rows before the first are masked.
        ring_row = (position + row + NUM_TAPS) % NUM_TAPS
        tl.store(ring_ptr + ring_row * NUM_CHANNELS + channels, raw, mask=is_row)


@triton.jit
def store_tile(ptrs, tile, is_tile, IS_WHOLE: tl.constexpr):
    """Store where is_tile, or everywhere when the tile is known to be whole."""
    if IS_WHOLE:
        tl.store(ptrs, tile)
    else:
        tl.store(ptrs, tile, mask=is_tile)


@triton.jit
def gdn_prefill_scan_kernel(
    projected_ptr,
    positions_ptr,
    row_starts_ptr,
    chunk_starts_ptr,
    state_slots_ptr,
    conv_pool_ptr,
    state_pool_ptr,
    queries_keys_ptr,
    values_ptr,
    inverses_ptr,
    factors_ptr,
    boundary_states_ptr,
    projected_stride,
    conv_slot_stride,
    state_slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_V_BLOCKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NUM_FACTORS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (request, value head, BLOCK_V rows of the state).

    A chunk's new values are D = (beta v - beta e^G k h) (I + A)^-T, all transposed: [V, row], and
    the next state h e^G_last + D e^(G_last - G) k. State rows are the rows of every product, so
    h and D stay in registers. D replaces the values [NC, HV, V, CHUNK]. Also writes the state
    before each chunk, the last state, and the conv ring (`gdn_prefill_conv_kernel` read it).
    """
    IS_WHOLE: tl.constexpr = (K == BLOCK_K) & (V == NUM_V_BLOCKS * BLOCK_V)
    request = tl.program_id(0) // (HV * NUM_V_BLOCKS)
    head_block = tl.program_id(0) % (HV * NUM_V_BLOCKS)
    v_head = head_block // NUM_V_BLOCKS
    first_row = tl.load(row_starts_ptr + request)
    num_rows = (tl.load(row_starts_ptr + request + 1) - first_row).to(tl.int32)
    if num_rows == 0:
        return
    slot = tl.load(state_slots_ptr + request)
    position = tl.load(positions_ptr + first_row).to(tl.int32)
    if slot != 0:
        write_ring(
            projected_ptr + first_row * projected_stride,
            conv_pool_ptr + slot * conv_slot_stride,
            position,
            num_rows,
            head_block * BLOCK_C,
            projected_stride,
            2 * H * K + HV * V,
            NUM_TAPS,
            BLOCK_C,
        )
    dims = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, CHUNK)
    v_dims = head_block % NUM_V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    is_tile = (v_dims < V)[:, None] & (dims < K)[None, :]
    tile = v_dims[:, None] * K + dims[None, :]
    state_ptrs = state_pool_ptr + slot * state_slot_stride + v_head * (V * K) + tile
    state = tl.load(state_ptrs, mask=is_tile & (position > 0), other=0.0).to(tl.float32)
    first_pair = tl.load(chunk_starts_ptr + request) * HV + v_head
    dtype = values_ptr.dtype.element_ty
    for step in tl.range(0, tl.cdiv(num_rows, CHUNK), num_stages=NUM_STAGES):
        pair = first_pair + step * HV
        k_tile = pair // HV * (2 * H) + H + v_head // (HV // H)
        k_ptr = queries_keys_ptr + k_tile * (CHUNK * BLOCK_K)
        k = tl.load(k_ptr + rows[:, None] * BLOCK_K + dims[None, :])
        value_ptr = values_ptr + pair * (NUM_V_BLOCKS * BLOCK_V * CHUNK)
        value_ptrs = value_ptr + v_dims[:, None] * CHUNK + rows[None, :]
        values = tl.load(value_ptrs)
        inverse_ptr = inverses_ptr + pair * (CHUNK * CHUNK)
        inverse = tl.load(inverse_ptr + rows[:, None] * CHUNK + rows[None, :])
        factor_ptrs = factors_ptr + pair * (NUM_FACTORS * CHUNK) + rows
        beta = tl.load(factor_ptrs + 2 * CHUNK)
        read_factor = tl.load(factor_ptrs + 3 * CHUNK)
        write_factor = tl.load(factor_ptrs + 4 * CHUNK)
        last_decay = tl.load(factors_ptr + pair * (NUM_FACTORS * CHUNK) + CHUNK - 1)
        read = tl.dot(state.to(dtype), tl.trans(k), input_precision="ieee")
        store_tile(boundary_states_ptr + pair * (V * K) + tile, state, is_tile, IS_WHOLE)
        change = values.to(tl.float32) * beta[None, :] - read * read_factor[None, :]
        change = tl.dot(change.to(dtype), tl.trans(inverse), input_precision="ieee")
        tl.store(value_ptrs, change.to(dtype))
        state *= tl.exp(last_decay)
        change = (change * write_factor[None, :]).to(dtype)
        state = tl.dot(change, k, acc=state, input_precision="ieee")
    # Loaded again, not kept: every register is taken in the loop.
    slot = tl.load(state_slots_ptr + request)
    if slot != 0:
        state_ptrs = state_pool_ptr + slot * state_slot_stride + v_head * (V * K) + tile
        stored = state.to(state_pool_ptr.dtype.element_ty)
        store_tile(state_ptrs, stored, is_tile, IS_WHOLE)
