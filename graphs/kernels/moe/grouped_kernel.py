# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The experts' products over tiles of rows that share an expert (see `group_pairs_kernel`).

The weight is the left operand: its many rows fill the matrix instruction, and the rows of a
tile, few in decode, only its short side. Expert NUM_EXPERTS is the shared one.
"""

import triton
import triton.language as tl

REPEAT_ROWS = tl.constexpr(64)  # tiles from here on repeat their last row to be full


@triton.jit
def fill_tile(o_place, i_end, BLOCK_M: tl.constexpr):
    """Places to read, and which of them to read.

    High tiles read their last row again in place of rows they lack, because predicates take
    registers; in low tiles, mostly empty, that would be the larger part of the reading. Nothing
    of it is stored.
    """
    if BLOCK_M >= REPEAT_ROWS:
        return tl.minimum(o_place, i_end - 1), tl.full([BLOCK_M], 1, tl.int1)
    else:
        return o_place, o_place < i_end


@triton.jit
def grouped_gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    shared_gate_up_ptr,
    pairs_ptr,
    tiles_ptr,
    inner_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner [places, max(INNER, SHARED_INNER)] = silu(gate) * up, in the order of the places.

    One program: a tile and BLOCK_N inner dims.
    """
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (INNER_STRIDE + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) // NUM_BLOCKS
    i_n = tl.program_id(0) % NUM_BLOCKS
    i_expert = tl.load(tiles_ptr + i_tile)
    if i_expert < 0:
        return
    o_place = tl.load(tiles_ptr + num_tiles + i_tile) + tl.arange(0, BLOCK_M)
    i_end = tl.load(tiles_ptr + 2 * num_tiles + i_tile)
    m_m = o_place < i_end
    o_read, m_read = fill_tile(o_place, i_end, BLOCK_M)
    is_shared = i_expert == NUM_EXPERTS
    width = INNER if SHARED_INNER == INNER else tl.where(is_shared, SHARED_INNER, INNER)
    p_expert = gate_up_ptr + i_expert.to(tl.int64) * (2 * INNER * HIDDEN)
    p_weight = shared_gate_up_ptr if is_shared else p_expert
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < width
    o_row = tl.load(pairs_ptr + o_read, mask=m_read, other=0) // NUM_SLOTS
    p_x = x_ptr + o_row[None, :].to(tl.int64) * HIDDEN + o_k[:, None]
    p_gate = p_weight + o_n[:, None] * HIDDEN + o_k[None, :]
    p_up = p_gate + width * HIDDEN
    b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K == 0:
            b_x = tl.load(p_x + k, mask=m_read[None, :], other=0.0)
            b_gate_w = tl.load(p_gate + k, mask=m_n[:, None], other=0.0)
            b_up_w = tl.load(p_up + k, mask=m_n[:, None], other=0.0)
        else:
            m_k = k + o_k < HIDDEN
            b_x = tl.load(p_x + k, mask=m_read[None, :] & m_k[:, None], other=0.0)
            b_gate_w = tl.load(p_gate + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
            b_up_w = tl.load(p_up + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_gate = tl.dot(b_gate_w, b_x, b_gate, input_precision="ieee")
        b_up = tl.dot(b_up_w, b_x, b_up, input_precision="ieee")
    b_inner = tl.trans(b_gate * tl.sigmoid(b_gate) * b_up)
    p_inner = inner_ptr + o_place[:, None].to(tl.int64) * INNER_STRIDE + o_n[None, :]
    tl.store(p_inner, b_inner, mask=m_m[:, None] & m_n[None, :])


@triton.jit
def grouped_down_kernel(
    inner_ptr,
    down_ptr,
    shared_down_ptr,
    weights_ptr,
    pairs_ptr,
    tiles_ptr,
    outputs_ptr,
    num_tiles,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """outputs [pairs, HIDDEN] = the pair's weight * down(inner), back in the order of the pairs.

    One program: a tile and BLOCK_N hidden dims.
    """
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_tile = tl.program_id(0) // NUM_BLOCKS
    i_n = tl.program_id(0) % NUM_BLOCKS
    i_expert = tl.load(tiles_ptr + i_tile)
    if i_expert < 0:
        return
    o_place = tl.load(tiles_ptr + num_tiles + i_tile) + tl.arange(0, BLOCK_M)
    i_end = tl.load(tiles_ptr + 2 * num_tiles + i_tile)
    m_m = o_place < i_end
    o_read, m_read = fill_tile(o_place, i_end, BLOCK_M)
    is_shared = i_expert == NUM_EXPERTS
    width = INNER if SHARED_INNER == INNER else tl.where(is_shared, SHARED_INNER, INNER)
    p_expert = down_ptr + i_expert.to(tl.int64) * (HIDDEN * INNER)
    p_weight = shared_down_ptr if is_shared else p_expert
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < HIDDEN
    p_inner = inner_ptr + o_read[None, :].to(tl.int64) * INNER_STRIDE + o_k[:, None]
    p_down = p_weight + o_n[:, None] * width + o_k[None, :]
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, width, BLOCK_K):
        if SHARED_INNER == INNER and INNER % BLOCK_K == 0:
            b_inner = tl.load(p_inner + k, mask=m_read[None, :], other=0.0)
            b_down = tl.load(p_down + k, mask=m_n[:, None], other=0.0)
        else:
            m_k = k + o_k < width
            b_inner = tl.load(p_inner + k, mask=m_read[None, :] & m_k[:, None], other=0.0)
            b_down = tl.load(p_down + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_sum = tl.dot(b_down, b_inner, b_sum, input_precision="ieee")
    o_pair = tl.load(pairs_ptr + o_place, mask=m_m, other=0)
    b_weights = tl.load(weights_ptr + o_pair, mask=m_m, other=0.0)
    p_out = outputs_ptr + o_pair[:, None].to(tl.int64) * HIDDEN + o_n[None, :]
    tl.store(p_out, tl.trans(b_sum * b_weights[None, :]), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def sum_slots_kernel(
    outputs_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [T, HIDDEN] = the sum of each row's NUM_SLOTS outputs, in the order of the slots."""
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    o_n = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < HIDDEN
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        p_output = outputs_ptr + i_row * (NUM_SLOTS * HIDDEN) + slot * HIDDEN
        b_sum += tl.load(p_output + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_row * HIDDEN + o_n, b_sum, mask=m_n)
