# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
"""One to a few rows: matrix-vector products of each pair (row, slot) with its expert.

Slot TOP_K is the shared expert, whose first product shares the router's launch. No sorting and
no launch for the choice of experts: every program finds its expert again from the logits, which
takes less time than a launch.
"""

import triton
import triton.language as tl

from graphs.kernels.moe.router_kernel import (
    find_expert,
    load_ranking_keys,
    load_shared_weight,
    select_experts,
    store_logits,
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
def store_inner(
    p_x,
    p_weight,
    p_inner,
    i_n,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N of one row's silu(gate) * up, WIDTH wide, of one expert's weight [gate | up]."""
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < WIDTH
    p_gate = p_weight + o_n[:, None] * HIDDEN
    p_up = p_gate + WIDTH * HIDDEN
    b_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in tl.static_range(0, HIDDEN, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < HIDDEN
        m_w = m_n[:, None] & m_k[None, :]
        b_gate_w = tl.load(p_gate + o_k[None, :], mask=m_w, other=0.0).to(tl.float32)
        b_up_w = tl.load(p_up + o_k[None, :], mask=m_w, other=0.0).to(tl.float32)
        # [1, BLOCK_K], in the layout of the weights: no exchange between threads.
        b_x = tl.load(p_x + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)
        b_gate += b_gate_w * b_x
        b_up += b_up_w * b_x
    b_gate_sum = tl.sum(b_gate, 1)
    b_inner = b_gate_sum * tl.sigmoid(b_gate_sum) * tl.sum(b_up, 1)
    tl.store(p_inner + o_n, b_inner, mask=m_n)


@triton.jit
def pair_router_kernel(
    x_ptr,
    router_ptr,
    gate_ptr,
    shared_gate_up_ptr,
    logits_ptr,
    shared_inner_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    SHARED_INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    SHARED_BLOCK_N: tl.constexpr,
    SHARED_BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Router logits, and shared_inner [T, SHARED_INNER], which waits for no choice.

    The first programs take a row and SHARED_BLOCK_N dims each, the others are `store_logits`.
    """
    NUM_BLOCKS: tl.constexpr = (SHARED_INNER + SHARED_BLOCK_N - 1) // SHARED_BLOCK_N
    i_program = tl.program_id(0)
    if i_program < num_rows * NUM_BLOCKS:
        i_row = i_program // NUM_BLOCKS
        store_inner(
            x_ptr + i_row * HIDDEN,
            shared_gate_up_ptr,
            shared_inner_ptr + i_row * SHARED_INNER,
            i_program % NUM_BLOCKS,
            HIDDEN,
            SHARED_INNER,
            SHARED_BLOCK_N,
            SHARED_BLOCK_K,
        )
    else:
        store_logits(
            i_program - num_rows * NUM_BLOCKS,
            x_ptr,
            router_ptr,
            gate_ptr,
            logits_ptr,
            num_rows,
            HIDDEN,
            NUM_EXPERTS,
            LOGITS_STRIDE,
            SPLITS,
            SPLIT_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def pair_gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    logits_ptr,
    inner_ptr,
    weights_ptr,
    ids_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
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
    """inner [T, TOP_K, INNER] = silu(gate) * up; one chosen pair and BLOCK_N dims.

    The first num_rows programs only write weights and ids for `pair_down_kernel`.
    """
    NUM_BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
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
    i_slot = i_program // NUM_BLOCKS // num_rows
    p_logits = logits_ptr + (i_row + tl.arange(0, 1)) * LOGITS_STRIDE
    m_row = tl.full([1], 1, tl.int1)
    _, b_keys = load_ranking_keys(
        p_logits, m_row, split_stride, NUM_EXPERTS, SPLITS, 1, EXPERTS_PADDED
    )
    i_expert = find_expert(b_keys, i_slot, EXPERTS_PADDED)
    store_inner(
        x_ptr + i_row * HIDDEN,
        gate_up_ptr + i_expert.to(tl.int64) * (2 * INNER * HIDDEN),
        inner_ptr + (i_row * TOP_K + i_slot) * INNER,
        i_n,
        HIDDEN,
        INNER,
        BLOCK_N,
        BLOCK_K,
    )


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
    shared_inner_ptr,
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
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    i_row = tl.program_id(0) // NUM_BLOCKS
    o_n = tl.program_id(0) % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < HIDDEN
    p_inner = inner_ptr + i_row * TOP_K * INNER
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
            p_slot = p_inner + slot * INNER
            b_sum = add_products(b_sum, ahead[slot - first], p_slot, factor, INNER, BLOCK_K)
    factor = tl.load(p_weights + TOP_K)
    p_shared = shared_inner_ptr + i_row * SHARED_INNER
    b_sum = add_products(b_sum, shared, p_shared, factor, SHARED_INNER, BLOCK_K)
    tl.store(out_ptr + i_row * HIDDEN + o_n, tl.sum(b_sum, 1), mask=m_n)
