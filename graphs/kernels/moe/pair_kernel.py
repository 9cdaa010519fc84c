# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""One to a few rows: matrix-vector products of each pair (row, slot) with its expert.

Slot TOP_K is the shared expert. No sorting and no launch for the choice of experts: every
program chooses again from the logits, which takes less time than a launch.
"""

import triton
import triton.language as tl

from graphs.kernels.moe.router_kernel import load_shared_weight, select_experts


@triton.jit
def pair_gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    shared_gate_up_ptr,
    logits_ptr,
    inner_ptr,
    weights_ptr,
    ids_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner [pairs, max(INNER, SHARED_INNER)] = silu(gate) * up, one pair and BLOCK_N dims.

    Also writes weights and ids [T, TOP_K + 1] for `pair_down_kernel`.
    """
    NUM_SLOTS: tl.constexpr = TOP_K + 1
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (INNER_STRIDE + BLOCK_N - 1) // BLOCK_N
    i_n = tl.program_id(0) % NUM_BLOCKS
    i_row = tl.program_id(0) // NUM_BLOCKS % num_rows
    # The shared expert goes first: its weights stream while the others still choose.
    i_slot = (tl.program_id(0) // NUM_BLOCKS // num_rows + TOP_K) % NUM_SLOTS
    i_pair = i_row * NUM_SLOTS + i_slot
    split_stride = num_rows * LOGITS_STRIDE
    o_row = i_row + tl.arange(0, 1)
    o_slot = tl.arange(0, SLOTS_PADDED)
    p_logits = logits_ptr + o_row * LOGITS_STRIDE
    if i_slot == TOP_K:
        p_weight = shared_gate_up_ptr
        if i_n == 0:
            b_weight = load_shared_weight(p_logits, o_row >= 0, split_stride, NUM_EXPERTS, SPLITS)
            tl.store(weights_ptr + o_row * NUM_SLOTS + TOP_K, b_weight)
    else:
        b_ids, b_weights, _ = select_experts(
            p_logits,
            o_row >= 0,
            split_stride,
            NUM_EXPERTS,
            TOP_K,
            RENORMALISE,
            SPLITS,
            1,
            EXPERTS_PADDED,
            SLOTS_PADDED,
        )
        if (i_n == 0) & (i_slot == 0):
            o_pair = o_row[:, None] * NUM_SLOTS + o_slot[None, :]
            tl.store(weights_ptr + o_pair, b_weights, mask=(o_slot < TOP_K)[None, :])
            tl.store(ids_ptr + o_pair, b_ids, mask=(o_slot < TOP_K)[None, :])
        i_expert = tl.sum(tl.where((o_slot == i_slot)[None, :], b_ids, 0))
        p_weight = gate_up_ptr + i_expert.to(tl.int64) * (2 * INNER * HIDDEN)
    width = INNER if SHARED_INNER == INNER else tl.where(i_slot == TOP_K, SHARED_INNER, INNER)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < width
    p_gate = p_weight + o_n[:, None] * HIDDEN
    p_up = p_gate + width * HIDDEN
    b_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.static_range(0, HIDDEN, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < HIDDEN
        m_w = m_n[:, None] & m_k[None, :]
        b_gate_w = tl.load(p_gate + o_k[None, :], mask=m_w, other=0.0).to(tl.float32)
        b_up_w = tl.load(p_up + o_k[None, :], mask=m_w, other=0.0).to(tl.float32)
        # [1, BLOCK_K], in the layout of the weights: no exchange between threads.
        p_x = x_ptr + i_row * HIDDEN + o_k[None, :]
        b_x = tl.load(p_x, mask=m_k[None, :], other=0.0).to(tl.float32)
        b_gate += b_gate_w * b_x
        b_up += b_up_w * b_x
    b_gate_sum = tl.sum(b_gate, 1)
    b_inner = b_gate_sum * tl.sigmoid(b_gate_sum) * tl.sum(b_up, 1)
    tl.store(inner_ptr + i_pair * INNER_STRIDE + o_n, b_inner, mask=m_n)


@triton.jit
def add_products(
    b_sum, p_weight, p_inner, factor, o_n, m_n, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr
):
    """b_sum [BLOCK_N, BLOCK_K] plus weight rows o_n times factor * inner, both WIDTH long."""
    for k in tl.static_range(0, WIDTH, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < WIDTH
        p_block = p_weight + o_n[:, None] * WIDTH + o_k[None, :]
        b_block = tl.load(p_block, mask=m_n[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        b_inner = tl.load(p_inner + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)
        b_sum += b_block * (b_inner * factor)
    return b_sum


@triton.jit
def pair_down_kernel(
    inner_ptr,
    down_ptr,
    shared_down_ptr,
    weights_ptr,
    ids_ptr,
    out_ptr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [T, HIDDEN] = the weighted sum over the row's experts; one row and BLOCK_N dims."""
    NUM_SLOTS: tl.constexpr = TOP_K + 1
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_row = tl.program_id(0) // NUM_BLOCKS
    o_n = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < HIDDEN
    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    p_inner = inner_ptr + i_row * NUM_SLOTS * INNER_STRIDE
    for slot in tl.static_range(TOP_K):
        i_expert = tl.load(ids_ptr + i_row * NUM_SLOTS + slot).to(tl.int64)
        factor = tl.load(weights_ptr + i_row * NUM_SLOTS + slot)
        p_weight = down_ptr + i_expert * (HIDDEN * INNER)
        b_sum = add_products(b_sum, p_weight, p_inner, factor, o_n, m_n, INNER, BLOCK_K)
        p_inner += INNER_STRIDE
    factor = tl.load(weights_ptr + i_row * NUM_SLOTS + TOP_K)
    b_sum = add_products(b_sum, shared_down_ptr, p_inner, factor, o_n, m_n, SHARED_INNER, BLOCK_K)
    tl.store(out_ptr + i_row * HIDDEN + o_n, tl.sum(b_sum, 1), mask=m_n)
