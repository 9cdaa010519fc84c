# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Paged attention of a few rows per request, the context split over programs.

A program holds all query heads and rows of one (request, key/value head), so that a tile of
keys and values is read once. Each split leaves a normalised result and the logarithm of its
weight; the combine kernel adds them up in split order, so runs repeat bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.tile_kernel import LOWEST, attend_tile, load_pages


@triton.jit
def gate_and_store(b_out, out_ptr, o_out, qkv_ptr, o_gate, mask):
    """Store b_out * sigmoid(gate)."""
    b_gate = tl.load(qkv_ptr + o_gate, mask=mask, other=0.0).to(tl.float32)
    b_out = b_out / (1.0 + tl.exp(-b_gate))
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["page_table_stride", "num_splits"])
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
    page_table_stride,
    num_splits,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    # Neighbours read the heads of the same tokens: one stretch of memory.
    i_h = tl.program_id(0) % H
    i_split = (tl.program_id(0) // H) % num_splits
    i_r = (tl.program_id(0) // (H * num_splits)).to(tl.int64)
    context_len = tl.load(context_lens_ptr + i_r).to(tl.int32)
    num_tiles = tl.cdiv(context_len, BLOCK_N)
    num_used = tl.maximum(tl.minimum(num_splits, tl.cdiv(num_tiles, MIN_TILES)), 1)
    first_tile = tl.minimum(i_split * num_tiles // num_used, num_tiles)
    end_tile = tl.minimum((i_split + 1) * num_tiles // num_used, num_tiles)

    o_m = tl.arange(0, M_PAD)
    o_d = tl.arange(0, D_PAD)
    o_row = i_r * ROWS + o_m // G
    o_head = i_h * G + o_m % G
    o_partial = (o_row * (H * G) + o_head) * num_splits + i_split
    if IS_SPLIT and i_split >= num_used:  # a short context has fewer splits
        p_log_weight = log_weight_ptr + o_partial
        tl.store(p_log_weight, tl.full([M_PAD], float("-inf"), tl.float32), mask=o_m < ROWS * G)
        return

    m_md = (o_m < ROWS * G)[:, None] & (o_d < D)[None, :]
    o_q = (o_row * (H * G) + o_head)[:, None] * D + o_d[None, :]
    b_q = tl.load(q_ptr + o_q, mask=m_md, other=0.0)
    b_visible = context_len - ROWS + 1 + o_m // G

    b_max = tl.full([M_PAD], LOWEST, tl.float32)
    b_sum = tl.zeros([M_PAD], tl.float32)
    b_acc = tl.zeros([M_PAD, D_PAD], tl.float32)
    p_table = page_table_ptr + i_r * page_table_stride
    pages = load_pages(p_table, first_tile * BLOCK_N, context_len, PAGE_SIZE, BLOCK_N)
    for i_tile in range(first_tile, end_tile):
        first_token = i_tile * BLOCK_N
        next_pages = load_pages(p_table, first_token + BLOCK_N, context_len, PAGE_SIZE, BLOCK_N)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, b_visible,
            k_pool_ptr + i_h * D, v_pool_ptr + i_h * D,
            pages, first_token, context_len, scale, H, D, D_PAD, PAGE_SIZE, BLOCK_N, True,
        )  # fmt: skip
        pages = next_pages
    has_seen = b_sum > 0.0  # a verify row may see nothing of the last split
    b_sum = tl.where(has_seen, b_sum, 1.0)
    b_acc *= (1.0 / b_sum)[:, None]
    if IS_SPLIT:
        b_log_weight = tl.where(has_seen, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(log_weight_ptr + o_partial, b_log_weight, mask=o_m < ROWS * G)
        tl.store(partial_ptr + o_partial[:, None] * D + o_d[None, :], b_acc, mask=m_md)
    else:
        o_gate = (o_row * qkv_stride + (2 * o_head + 1) * D)[:, None] + o_d[None, :]
        gate_and_store(b_acc, out_ptr, o_q, qkv_ptr, o_gate, m_md)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits_kernel(
    partial_ptr,
    log_weight_ptr,
    qkv_ptr,
    out_ptr,
    qkv_stride,
    num_splits,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per (row, query head, block of dims)."""
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    i_head = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)  # over rows and heads
    o_d = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_max = LOWEST
    b_sum = 0.0
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        o_s = first + tl.arange(0, BLOCK_S)
        m_s = o_s < num_splits
        o_partial = i_head * num_splits + o_s
        p_partial = partial_ptr + o_partial[:, None] * D + o_d[None, :]
        b_partial = tl.load(p_partial, mask=m_s[:, None] & m_d[None, :], other=0.0)
        b_log_weight = tl.load(log_weight_ptr + o_partial, mask=m_s, other=float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_log_weight, axis=0))
        b_decay = tl.exp2(b_max - b_new_max)
        b_weight = tl.exp2(b_log_weight - b_new_max)
        b_sum = b_sum * b_decay + tl.sum(b_weight, axis=0)
        # Splits without tokens have written no result.
        b_partial = tl.where(b_weight[:, None] > 0.0, b_partial, 0.0)
        b_acc = b_acc * b_decay + tl.sum(b_partial * b_weight[:, None], axis=0)
        b_max = b_new_max
    b_out = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)
    o_gate = (i_head // HQ) * qkv_stride + (2 * (i_head % HQ) + 1) * D + o_d
    gate_and_store(b_out, out_ptr, i_head * D + o_d, qkv_ptr, o_gate, m_d)
