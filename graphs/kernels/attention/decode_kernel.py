# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Paged attention of a few rows per request, the context split over programs.

A program holds all query heads and rows of one (request, key/value head), so that a tile of
keys and values is read once. Each split leaves a normalised result and the logarithm of its
weight; the combine kernel adds them up in split order, so runs repeat bit by bit.

LOADS_ALL_SPLITS, for few programs: every split leaves something, and the combine kernel loads
them all without asking how many a context has used. Otherwise it looks, and a context of one
split has been written out already. For many programs, pooled_kernel.py has fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.tile_kernel import LOWEST, attend_tile, load_pages

# The log weight of a split that has seen no token. Finite: torch.compile writes constants out by
# name, and an infinity has none. Its power of two is zero beside LOWEST as well.
NOTHING = tl.constexpr(-3e38)


@triton.jit
def gate_and_store(b_out, out_ptr, o_out, qkv_ptr, o_gate, mask):
    """Store b_out * sigmoid(gate)."""
    b_gate = tl.load(qkv_ptr + o_gate, mask=mask, other=0.0).to(tl.float32)
    b_out = b_out / (1.0 + tl.exp(-b_gate))
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def count_splits(num_tiles, num_splits, min_tiles):
    """How many of num_splits a context uses, one at least; several have min_tiles or more each.

    The fewest with the same longest split: 16 tiles over 5 splits are 4 splits of 4 tiles.
    """
    num_used = tl.maximum(tl.minimum(num_splits, num_tiles // min_tiles), 1)
    longest = tl.maximum(tl.cdiv(num_tiles, num_used), 1)
    return tl.maximum(tl.cdiv(num_tiles, longest), 1)


@triton.jit
def load_queries(
    q_ptr,
    i_r,
    i_h,
    H: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
):
    """[M_PAD, D_PAD]: the query heads of key/value head i_h, row by row of request i_r."""
    o_m = tl.arange(0, M_PAD)
    o_d = tl.arange(0, D_PAD)
    m_md = (o_m < ROWS * G)[:, None] & (o_d < D)[None, :]
    o_head = (i_r * ROWS + o_m // G) * (H * G) + i_h * G + o_m % G
    return tl.load(q_ptr + (o_head[:, None] * D + o_d[None, :]), mask=m_md, other=0.0)


@triton.jit
def attend_split(
    b_q,
    pages,
    qkv_ptr,
    k_pool_ptr,
    v_pool_ptr,
    p_table,
    partial_ptr,
    log_weight_ptr,
    out_ptr,
    qkv_stride,
    context_len,
    num_used,
    num_splits,
    i_r,
    i_h,
    i_split,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    LOADS_ALL_SPLITS: tl.constexpr,
):
    """One of the num_used splits of a context: what it leaves, or where it is alone, the output.

    b_q as from load_queries; pages, strided, those of the split's first tile. No return inside:
    what a loop calls is one block.
    """
    o_m = tl.arange(0, M_PAD)
    o_d = tl.arange(0, D_PAD)
    o_row = i_r * ROWS + o_m // G
    o_head = i_h * G + o_m % G
    m_md = (o_m < ROWS * G)[:, None] & (o_d < D)[None, :]
    num_tiles = tl.cdiv(context_len, BLOCK_N)
    if IS_STRIDED:
        first_tile, end_tile, step = i_split, num_tiles, num_used
    else:
        tiles = tl.cdiv(num_tiles, num_used)
        first_tile, step = i_split * tiles, 1
        end_tile = tl.minimum(first_tile + tiles, num_tiles)
        pages = load_pages(p_table, first_tile * BLOCK_N, context_len, PAGE_SIZE, BLOCK_N)
    b_visible = context_len - ROWS + 1 + o_m // G
    b_max = tl.full([M_PAD], LOWEST, tl.float32)
    b_sum = tl.zeros([M_PAD], tl.float32)
    b_acc = tl.zeros([M_PAD, D_PAD], tl.float32)
    for i_tile in range(first_tile, end_tile, step):
        next_token = (i_tile + step) * BLOCK_N
        next_pages = load_pages(p_table, next_token, context_len, PAGE_SIZE, BLOCK_N)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, b_visible,
            k_pool_ptr + i_h * D, v_pool_ptr + i_h * D,
            pages, i_tile * BLOCK_N, context_len, SCALE, H, D, D_PAD, PAGE_SIZE, BLOCK_N, True,
        )  # fmt: skip
        pages = next_pages
    has_seen = b_sum > 0.0  # a verify row may see nothing of a split
    b_sum = tl.where(has_seen, b_sum, 1.0)
    b_acc *= (1.0 / b_sum)[:, None]
    if LOADS_ALL_SPLITS or num_used > 1:
        b_log_weight = tl.where(has_seen, b_max + tl.log2(b_sum), NOTHING)
        o_partial = (o_row * (H * G) + o_head) * num_splits + i_split
        tl.store(log_weight_ptr + o_partial, b_log_weight, mask=o_m < ROWS * G)
        tl.store(partial_ptr + o_partial[:, None] * D + o_d[None, :], b_acc, mask=m_md)
    else:
        o_q = (o_row * (H * G) + o_head)[:, None] * D + o_d[None, :]
        o_gate = (o_row * qkv_stride + (2 * o_head + 1) * D)[:, None] + o_d[None, :]
        gate_and_store(b_acc, out_ptr, o_q, qkv_ptr, o_gate, m_md)


@triton.jit(do_not_specialize=["num_table_pages", "page_table_stride", "num_splits", "min_tiles"])
def paged_decode_kernel(
    q_ptr,
    qkv_ptr,
    k_pool_ptr,
    v_pool_ptr,
    page_table_ptr,
    context_lens_ptr,
    partial_ptr,
    log_weight_ptr,
    out_ptr,
    qkv_stride,
    num_table_pages,
    page_table_stride,
    num_splits,
    min_tiles,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_STRIDED: tl.constexpr,
    LOADS_ALL_SPLITS: tl.constexpr,
):
    """One program per (request, key/value head, split)."""
    # Neighbours read the heads of the same tokens: one stretch of memory.
    i_h = tl.program_id(0) % H
    i_split = (tl.program_id(0) // H) % num_splits
    i_r = (tl.program_id(0) // (H * num_splits)).to(tl.int64)
    context_len = tl.load(context_lens_ptr + i_r).to(tl.int32)
    # Loads that need not wait for context_len go before the first use of it.
    b_q = load_queries(q_ptr, i_r, i_h, H, G, ROWS, D, D_PAD, M_PAD)
    p_table = page_table_ptr + i_r * page_table_stride
    pages = 0
    if IS_STRIDED:  # split i takes tiles i, i + num_used, ...
        table_tokens = num_table_pages * PAGE_SIZE
        pages = load_pages(p_table, i_split * BLOCK_N, table_tokens, PAGE_SIZE, BLOCK_N)

    num_used = count_splits(tl.cdiv(context_len, BLOCK_N), num_splits, min_tiles)
    if i_split >= num_used:
        if LOADS_ALL_SPLITS:
            o_m = tl.arange(0, M_PAD)
            o_head = (i_r * ROWS + o_m // G) * (H * G) + i_h * G + o_m % G
            p_log_weight = log_weight_ptr + o_head * num_splits + i_split
            tl.store(p_log_weight, tl.full([M_PAD], NOTHING, tl.float32), mask=o_m < ROWS * G)
        return
    attend_split(
        b_q, pages, qkv_ptr, k_pool_ptr, v_pool_ptr, p_table,
        partial_ptr, log_weight_ptr, out_ptr, qkv_stride,
        context_len, num_used, num_splits, i_r, i_h, i_split,
        SCALE, H, G, ROWS, D, D_PAD, M_PAD, PAGE_SIZE, BLOCK_N, IS_STRIDED, LOADS_ALL_SPLITS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits", "min_tiles"])
def combine_splits_kernel(
    partial_ptr,
    log_weight_ptr,
    context_lens_ptr,
    qkv_ptr,
    out_ptr,
    qkv_stride,
    num_splits,
    min_tiles,
    HQ: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    LOADS_ALL_SPLITS: tl.constexpr,
):
    """One program per (row, query head, NUM_BLOCKS blocks of dims), one block after the other.

    The order of a sum over splits is that of the tile's layout, so its width says the bits.
    """
    NUM_PIECES: tl.constexpr = (D + NUM_BLOCKS * BLOCK_D - 1) // (NUM_BLOCKS * BLOCK_D)
    i_head = (tl.program_id(0) // NUM_PIECES).to(tl.int64)  # over rows and heads
    first_block = (tl.program_id(0) % NUM_PIECES) * NUM_BLOCKS
    num_used = num_splits
    if not LOADS_ALL_SPLITS:
        context_len = tl.load(context_lens_ptr + i_head // (HQ * ROWS)).to(tl.int32)
        num_used = count_splits(tl.cdiv(context_len, BLOCK_N), num_splits, min_tiles)
        if num_used == 1:  # written out already
            return
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_used
    p_log_weight = log_weight_ptr + i_head * num_splits + o_s
    b_log_weight = tl.load(p_log_weight, mask=m_s, other=NOTHING)
    for i_block in tl.static_range(NUM_BLOCKS):
        o_d = (first_block + i_block) * BLOCK_D + tl.arange(0, BLOCK_D)
        m_d = o_d < D
        p_partial = partial_ptr + i_head * num_splits * D + (o_s[:, None] * D + o_d[None, :])
        b_partial = tl.load(p_partial, mask=m_s[:, None] & m_d[None, :], other=0.0)
        p_gate = qkv_ptr + ((i_head // HQ) * qkv_stride + (2 * (i_head % HQ) + 1) * D) + o_d
        b_gate = tl.load(p_gate, mask=m_d, other=0.0).to(tl.float32)
        # The same for each block, and past its loads: the first need not wait for b_log_weight.
        b_weight = tl.exp2(b_log_weight - tl.maximum(tl.max(b_log_weight, axis=0), LOWEST))
        b_sum = tl.sum(b_weight, axis=0)
        # What a split that sees nothing has written, or left unwritten, may be NaN.
        b_partial = tl.where(b_weight[:, None] > 0.0, b_partial, 0.0)
        b_acc = tl.sum(b_partial * b_weight[:, None], axis=0)
        b_out = b_acc / (tl.where(b_sum > 0.0, b_sum, 1.0) * (1.0 + tl.exp(-b_gate)))
        tl.store(out_ptr + i_head * D + o_d, b_out.to(out_ptr.dtype.element_ty), mask=m_d)
