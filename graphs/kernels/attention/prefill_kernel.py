# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Causal flash attention of a chunk of rows over its request's paged context.

One program per (piece of a chunk, HEADS query heads of one key/value head); its M = HEADS *
BLOCK_ROWS query rows are heads outside, rows inside. Long contexts start first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.decode_kernel import gate_and_store
from graphs.kernels.attention.tile_kernel import LOWEST, attend_tile, load_pages


@triton.jit
def zero_padding_rows(
    out_ptr,
    first,
    end,
    step,
    i_first_head,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Zero HEADS heads of every step-th row of [first, end): no request owns these rows."""
    o_d = tl.arange(0, D_PAD)
    for i_row in range(first, end, step):
        for i_head in tl.static_range(HEADS):
            o_row = tl.zeros([D_PAD], tl.int64) + i_row
            p_out = out_ptr + (o_row * HQ + i_first_head + i_head) * D + o_d
            tl.store(p_out, tl.zeros([D_PAD], out_ptr.dtype.element_ty), mask=o_d < D)


@triton.jit
def store_halves(
    b_out, out_ptr, o_out, qkv_ptr, o_gate, m_rows, D: tl.constexpr, HALF: tl.constexpr
):
    """Gate and store b_out [M, 2 * HALF] half by half: whole, it spills registers."""
    b_halves = tl.permute(tl.reshape(b_out, [b_out.shape[0], 2, HALF]), [0, 2, 1])
    b_low, b_high = tl.split(b_halves)
    o_d = tl.arange(0, HALF)
    mask = m_rows[:, None] & (o_d < D)[None, :]
    o_out = o_out[:, None] + o_d[None, :]
    o_gate = o_gate[:, None] + o_d[None, :]
    gate_and_store(b_low, out_ptr, o_out, qkv_ptr, o_gate, mask)
    mask = m_rows[:, None] & (o_d < D - HALF)[None, :]
    gate_and_store(b_high, out_ptr + HALF, o_out, qkv_ptr + HALF, o_gate, mask)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_requests", "num_chunks", "num_table_pages", "page_table_stride",
    ]
)  # fmt: skip
def paged_prefill_kernel(
    q_ptr,
    qkv_ptr,
    k_pool_ptr,
    v_pool_ptr,
    page_table_ptr,
    context_lens_ptr,
    row_starts_ptr,
    chunks_ptr,
    out_ptr,
    num_rows,
    num_requests,
    num_chunks,
    num_table_pages,
    qkv_stride,
    page_table_stride,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    GROUPS: tl.constexpr = G // HEADS
    PIECES: tl.constexpr = CHUNK // BLOCK_ROWS
    i_group = tl.program_id(0) % (H * GROUPS)
    i_h = i_group // GROUPS
    num_pieces = num_chunks * PIECES
    i_piece = num_pieces - 1 - tl.program_id(0) // (H * GROUPS)
    # What depends on nothing is loaded first: few round trips before the first tile.
    num_real_rows = tl.load(row_starts_ptr + num_requests).to(tl.int32)
    p_chunk = chunks_ptr + 2 * (i_piece // PIECES)
    i_r = tl.load(p_chunk)
    first_row = tl.load(p_chunk + 1).to(tl.int32)
    request_end = tl.load(row_starts_ptr + i_r + 1).to(tl.int32)
    context_len = tl.load(context_lens_ptr + i_r).to(tl.int32)
    p_table = page_table_ptr + i_r * page_table_stride
    pages = load_pages(p_table, 0, num_table_pages * PAGE_SIZE, PAGE_SIZE, BLOCK_N)
    zero_padding_rows(
        out_ptr, num_real_rows + i_piece, num_rows, num_pieces,
        i_group * HEADS, H * G, HEADS, D, D_PAD,
    )  # fmt: skip

    end_row = tl.minimum(first_row + CHUNK, request_end)
    first_row += (i_piece % PIECES) * BLOCK_ROWS
    end_row = tl.minimum(first_row + BLOCK_ROWS, end_row)
    if first_row >= end_row:
        return
    first_position = context_len - request_end + first_row
    token_limit = first_position + end_row - first_row

    # 64-bit bases and small constant offsets: few registers live through the loop.
    o_m = tl.arange(0, HEADS * BLOCK_ROWS) % BLOCK_ROWS
    o_head = tl.arange(0, HEADS * BLOCK_ROWS) // BLOCK_ROWS
    o_d = tl.arange(0, D_PAD)
    m_m = o_m < end_row - first_row
    o_base = (first_row.to(tl.int64) * (H * G) + i_group * HEADS) * D
    o_q = (o_m * (H * G) + o_head) * D
    p_q = q_ptr + o_base + o_q[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
    b_visible = first_position + 1 + o_m

    b_max = tl.full([HEADS * BLOCK_ROWS], LOWEST, tl.float32)
    b_sum = tl.zeros([HEADS * BLOCK_ROWS], tl.float32)
    b_acc = tl.zeros([HEADS * BLOCK_ROWS, D_PAD], tl.float32)
    k_ptr = k_pool_ptr + i_h * D
    v_ptr = v_pool_ptr + i_h * D
    full_end = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    for first_token in range(0, full_end, BLOCK_N):  # tiles that every row sees whole
        next_token = first_token + BLOCK_N
        next_pages = load_pages(p_table, next_token, token_limit, PAGE_SIZE, BLOCK_N)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, b_visible, k_ptr, v_ptr, pages,
            first_token, token_limit, SCALE, H, D, D_PAD, PAGE_SIZE, BLOCK_N, False,
        )  # fmt: skip
        pages = next_pages
    for first_token in range(full_end, token_limit, BLOCK_N):
        next_token = first_token + BLOCK_N
        next_pages = load_pages(p_table, next_token, token_limit, PAGE_SIZE, BLOCK_N)
        b_max, b_sum, b_acc = attend_tile(
            b_q, b_max, b_sum, b_acc, b_visible, k_ptr, v_ptr, pages,
            first_token, token_limit, SCALE, H, D, D_PAD, PAGE_SIZE, BLOCK_N, True,
        )  # fmt: skip
        pages = next_pages
    b_out = b_acc * (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
    qkv_ptr += first_row.to(tl.int64) * qkv_stride + (2 * i_group * HEADS + 1) * D
    o_gate = o_m * qkv_stride + 2 * o_head * D
    store_halves(b_out, out_ptr + o_base, o_q, qkv_ptr, o_gate, m_m, D, D_PAD // 2)
