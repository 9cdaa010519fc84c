"""Replay of accepted rows into the live state and the conv ring, all layers in one launch.

Each program reads some blocks of one head's state once and writes them once. Bitwise what
stepwise decode leaves, for every state dtype: see `advance_state`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment,var-annotated"
# ruff: noqa: E501, RUF005  (Triton adds tuples, but unpacks none)

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.gdn.decode_kernel import advance_state, load_state_rows, unit_length


@triton.jit
def replay_row(state, mixed_k, v, decay, beta, state_dtype: tl.constexpr):
    """One row of the recurrence on a block of the state, rounded as decode stores it."""
    k = unit_length(mixed_k)
    # No query: its output is not wanted, and the compiler drops it.
    state, _ = advance_state(state, k, k, v, decay, beta)
    return state.to(state_dtype).to(tl.float32)


@triton.jit
def load_conv_rows(
    stash_ptr,
    num_committed,
    channels,
    is_channel,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Raw conv inputs of the committed rows that the ring keeps, a tuple of ROWS."""
    raw = ()
    for row in tl.static_range(ROWS):
        is_kept = is_channel & (row < num_committed) & (row >= num_committed - NUM_TAPS)
        row_ptr = stash_ptr + row * NUM_CHANNELS
        raw = raw + (tl.load(row_ptr + channels, mask=is_kept, other=0.0),)
    return raw


@triton.jit
def store_conv_rows(
    raw,
    ring_ptr,
    position,
    num_committed,
    channels,
    is_channel,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Those rows into the ring, the first of all at `position`."""
    for row in tl.static_range(ROWS):
        is_kept = is_channel & (row < num_committed) & (row >= num_committed - NUM_TAPS)
        ring_row_ptr = ring_ptr + ((position + row) % NUM_TAPS) * NUM_CHANNELS
        tl.store(ring_row_ptr + channels, raw[row], mask=is_kept)


@triton.jit
def gdn_commit_kernel(
    conv_in_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    positions_ptr,
    num_committed_ptr,
    state_slots_ptr,
    conv_pool_ptr,
    state_pool_ptr,
    num_requests,
    stash_requests,
    conv_layer_stride,
    conv_slot_stride,
    state_layer_stride,
    state_slot_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_V_BLOCKS: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    BLOCKS_AHEAD: tl.constexpr,
):
    """Program (layer, request, value head, part of its blocks), the last one fastest."""
    NUM_PARTS: tl.constexpr = NUM_V_BLOCKS // BLOCKS_PER_PROGRAM
    NUM_CHANNELS: tl.constexpr = 2 * H * K + HV * V
    part = tl.program_id(0) % NUM_PARTS
    v_head = tl.program_id(0) // NUM_PARTS % HV
    request = tl.program_id(0) // (NUM_PARTS * HV) % num_requests
    layer = (tl.program_id(0) // (NUM_PARTS * HV) // num_requests).to(tl.int64)
    num_committed = tl.load(num_committed_ptr + request).to(tl.int32)
    slot = tl.load(state_slots_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + request).to(tl.int32)
    if (num_committed <= 0) | (slot == 0):
        return
    state_ptr = state_pool_ptr + layer * state_layer_stride + slot * state_slot_stride
    state_ptr += v_head * (V * K)
    first_block = part * BLOCKS_PER_PROGRAM
    is_past = position > 0
    tiles = ()
    for ahead in tl.static_range(BLOCKS_AHEAD):
        tile = load_state_rows(state_ptr, first_block + ahead, is_past, K, V, BLOCK_K, BLOCK_V)
        tiles = tiles + (tile,)
    stash_row = (layer * stash_requests + request) * ROWS
    conv_in_ptr += stash_row * NUM_CHANNELS
    k_offsets, blocks = tl.arange(0, BLOCK_K), tl.arange(0, NUM_V_BLOCKS)
    # Rows of V in blocks: [NUM_V_BLOCKS, BLOCK_V].
    v_dims = blocks[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    is_k = k_offsets < K
    q_channels = v_head // (HV // H) * K + k_offsets
    k_channels = H * K + q_channels
    v_channels = 2 * H * K + v_head * V + v_dims
    owns_v = (v_dims < V) & (part == 0)
    owns_qk = is_k & (part == 0) & (v_head % (HV // H) == 0)
    ks, vs, decays, betas = (), (), (), ()
    for row in tl.static_range(ROWS):
        is_row = row < num_committed
        k_ptrs = k_ptr + (stash_row + row) * (H * K) + q_channels
        ks = ks + (tl.load(k_ptrs, mask=is_k & is_row, other=0.0),)
        v_ptrs = v_ptr + (stash_row + row) * (HV * V) + v_head * V + v_dims
        vs = vs + (tl.load(v_ptrs, mask=(v_dims < V) & is_row, other=0.0),)
        gate = (stash_row + row) * HV + v_head
        decays = decays + (tl.load(decay_ptr + gate, mask=is_row, other=0.0),)
        betas = betas + (tl.load(beta_ptr + gate, mask=is_row, other=0.0),)
    raw_q = load_conv_rows(
        conv_in_ptr, num_committed, q_channels, owns_qk, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    raw_k = load_conv_rows(
        conv_in_ptr, num_committed, k_channels, owns_qk, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    raw_v = load_conv_rows(
        conv_in_ptr, num_committed, v_channels, owns_v, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    ring_ptr = conv_pool_ptr + layer * conv_layer_stride + slot * conv_slot_stride
    store_conv_rows(
        raw_q, ring_ptr, position, num_committed, q_channels, owns_qk, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    store_conv_rows(
        raw_k, ring_ptr, position, num_committed, k_channels, owns_qk, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    store_conv_rows(
        raw_v, ring_ptr, position, num_committed, v_channels, owns_v, NUM_CHANNELS, NUM_TAPS, ROWS
    )
    for block in tl.static_range(BLOCKS_PER_PROGRAM):
        # A load cannot pass a store before it by itself: they might be of the same rows.
        if block + BLOCKS_AHEAD < BLOCKS_PER_PROGRAM:
            following = first_block + block + BLOCKS_AHEAD
            tile = load_state_rows(state_ptr, following, is_past, K, V, BLOCK_K, BLOCK_V)
            tiles = tiles + (tile,)
        state = tiles[block].to(tl.float32)
        for row in tl.static_range(ROWS):
            if row < num_committed:
                is_block = blocks[:, None] == first_block + block
                v = tl.sum(tl.where(is_block, vs[row].to(tl.float32), 0.0), axis=0)
                state = replay_row(state, ks[row], v, decays[row], betas[row], tiles[block].dtype)
        rows_of_v = (first_block + block) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_v = rows_of_v < V
        tile_ptrs = state_ptr + rows_of_v[:, None] * K + k_offsets[None, :]
        tl.store(tile_ptrs, state.to(tiles[block].dtype), mask=is_v[:, None] & is_k[None, :])
