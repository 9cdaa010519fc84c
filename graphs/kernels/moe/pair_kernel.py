# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
"""One to a few rows: matrix-vector products of each pair (row, slot) with its expert.

Slot TOP_K is the shared expert. No sorting and no launch for the choice of experts: every
program finds its expert again from the logits, which takes less time than a launch.
"""

import triton
import triton.language as tl

from graphs.kernels.moe.router_kernel import (
    find_expert,
    load_ranking_keys,
    load_shared_weight,
    select_experts,
)


@triton.jit
def store_choice(
    weights_ptr,
    ids_ptr,
    p_logits,
    i_row,
    split_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
):
    """One row's weights and ids [T, TOP_K + 1]; the id of the shared expert is not written."""
    m_row = tl.full([1], 1, tl.int1)
    o_slot = tl.arange(0, SLOTS_PADDED)[None, :]
    b_ids, b_weights, _ = select_experts(
        p_logits,
        m_row,
        split_stride,
        NUM_EXPERTS,
        TOP_K,
        RENORMALISE,
        SPLITS,
        1,
        EXPERTS_PADDED,
        SLOTS_PADDED,
    )
    b_shared = load_shared_weight(p_logits, m_row, split_stride, NUM_EXPERTS, SPLITS)
    b_weights = tl.where(o_slot == TOP_K, b_shared[:, None], b_weights)
    o_pair = i_row * (TOP_K + 1) + o_slot
    tl.store(weights_ptr + o_pair, b_weights, mask=o_slot <= TOP_K)
    tl.store(ids_ptr + o_pair, b_ids, mask=o_slot < TOP_K)


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

    The first num_rows programs only write weights and ids for `pair_down_kernel`.
    """
    NUM_SLOTS: tl.constexpr = TOP_K + 1
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (INNER_STRIDE + BLOCK_N - 1) // BLOCK_N
    i_program = tl.program_id(0) - num_rows
    split_stride = num_rows * LOGITS_STRIDE
    if i_program < 0:
        i_row = tl.program_id(0)
        store_choice(
            weights_ptr,
            ids_ptr,
            logits_ptr + (i_row + tl.arange(0, 1)) * LOGITS_STRIDE,
            i_row,
            split_stride,
            NUM_EXPERTS,
            TOP_K,
            RENORMALISE,
            SPLITS,
            EXPERTS_PADDED,
            SLOTS_PADDED,
        )
        return
    i_n = i_program % NUM_BLOCKS
    i_row = i_program // NUM_BLOCKS % num_rows
    # The shared expert goes first: its weights stream while the others still choose.
    i_slot = (i_program // NUM_BLOCKS // num_rows + TOP_K) % NUM_SLOTS
    i_expert = tl.full([], 0, tl.int32)
    if i_slot < TOP_K:
        p_logits = logits_ptr + (i_row + tl.arange(0, 1)) * LOGITS_STRIDE
        m_row = tl.full([1], 1, tl.int1)
        _, b_keys = load_ranking_keys(
            p_logits, m_row, split_stride, NUM_EXPERTS, SPLITS, 1, EXPERTS_PADDED
        )
        i_expert = find_expert(b_keys, i_slot, EXPERTS_PADDED)
    is_shared = i_slot == TOP_K
    p_expert = gate_up_ptr + i_expert.to(tl.int64) * (2 * INNER * HIDDEN)
    p_weight = shared_gate_up_ptr if is_shared else p_expert
    width = INNER if SHARED_INNER == INNER else tl.where(is_shared, SHARED_INNER, INNER)
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
    tl.store(inner_ptr + (i_row * NUM_SLOTS + i_slot) * INNER_STRIDE + o_n, b_inner, mask=m_n)


@triton.jit
def load_blocks(p_weight, o_n, m_n, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """The weight rows o_n, WIDTH long, as a tuple of blocks [BLOCK_N, BLOCK_K]."""
    o_k = tl.arange(0, BLOCK_K)
    p_block = p_weight + o_n[:, None] * WIDTH + o_k[None, :]
    blocks = (tl.load(p_block, mask=m_n[:, None] & (o_k < WIDTH)[None, :], other=0.0),)
    for k in tl.static_range(BLOCK_K, WIDTH, BLOCK_K):
        m_block = m_n[:, None] & (k + o_k < WIDTH)[None, :]
        blocks = blocks + (tl.load(p_block + k, mask=m_block, other=0.0),)  # noqa: RUF005
    return blocks


@triton.jit
def add_products(b_sum, blocks, p_inner, factor, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """b_sum [BLOCK_N, BLOCK_K] plus the blocks times factor * inner, WIDTH long."""
    for i_block in tl.static_range((WIDTH + BLOCK_K - 1) // BLOCK_K):
        o_k = i_block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        b_inner = tl.load(p_inner + o_k, mask=o_k < WIDTH, other=0.0).to(tl.float32)
        b_sum += blocks[i_block].to(tl.float32) * (b_inner * factor)
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
    SLOTS_AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [T, HIDDEN] = the weighted sum over the row's experts; one row and BLOCK_N dims.

    The weights of up to SLOTS_AHEAD experts are on their way before the first product.
    """
    NUM_SLOTS: tl.constexpr = TOP_K + 1
    INNER_STRIDE: tl.constexpr = max(INNER, SHARED_INNER)
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_row = tl.program_id(0) // NUM_BLOCKS
    o_n = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < HIDDEN
    p_inner = inner_ptr + i_row * NUM_SLOTS * INNER_STRIDE
    p_weights = weights_ptr + i_row * NUM_SLOTS
    p_ids = ids_ptr + i_row * NUM_SLOTS
    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    shared = load_blocks(shared_down_ptr, o_n, m_n, SHARED_INNER, BLOCK_K)
    for first in tl.static_range(0, TOP_K, SLOTS_AHEAD):
        ahead = ()
        for slot in tl.static_range(first, min(first + SLOTS_AHEAD, TOP_K)):
            p_expert = down_ptr + tl.load(p_ids + slot).to(tl.int64) * (HIDDEN * INNER)
            ahead = ahead + (load_blocks(p_expert, o_n, m_n, INNER, BLOCK_K),)  # noqa: RUF005
        for slot in tl.static_range(first, min(first + SLOTS_AHEAD, TOP_K)):
            factor = tl.load(p_weights + slot)
            p_slot = p_inner + slot * INNER_STRIDE
            b_sum = add_products(b_sum, ahead[slot - first], p_slot, factor, INNER, BLOCK_K)
    factor = tl.load(p_weights + TOP_K)
    p_slot = p_inner + TOP_K * INNER_STRIDE
    b_sum = add_products(b_sum, shared, p_slot, factor, SHARED_INNER, BLOCK_K)
    tl.store(out_ptr + i_row * HIDDEN + o_n, tl.sum(b_sum, 1), mask=m_n)
