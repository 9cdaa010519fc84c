# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Paged attention of a few rows per request where page tables have room for many splits.

Few contexts use them. So there are programs for the first split of every (request, key/value
head), and a pool of programs that share the further splits in use, in order of requests, splits,
heads. Each split counts as many positions as its context's longest has tiles; a program of the
pool has an even share of all positions, and serves the splits that end in it: none has more to do
than its share and one split. Every split gives the bits that `paged_decode_kernel` gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.decode_kernel import attend_split, count_splits, load_queries
from graphs.kernels.attention.tile_kernel import load_pages

# These take lengths and no pointer to them: torch.compile believes that a kernel writes to whatever
# pointers went into a call whose result says where it stores.


@triton.jit
def count_further_splits(b_lens, num_splits, min_tiles, H: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of contexts: further splits, and the positions of each."""
    b_tiles = tl.cdiv(b_lens.to(tl.int32), BLOCK_N)
    b_used = count_splits(b_tiles, num_splits, min_tiles)
    return (b_used - 1) * H, tl.maximum(tl.cdiv(b_tiles, b_used), 1)


@triton.jit
def share_positions(num_positions, num_pairs):
    """The positions of this program of the pool: from the first up to the second returned."""
    i_pooled = tl.program_id(0) - num_pairs
    num_pooled = tl.num_programs(0) - num_pairs
    share = num_positions // num_pooled
    rest = num_positions % num_pooled  # as many programs have a position more
    first = i_pooled * share + tl.minimum(i_pooled, rest)
    return first, first + share + (i_pooled < rest).to(tl.int32)


@triton.jit
def count_before(position, b_begin, b_count, b_longest):
    """How many of the splits end at `position` or before it. Requests' begin at b_begin."""
    b_passed = tl.maximum(position - b_begin, 0) // b_longest
    return tl.sum(tl.minimum(b_passed, b_count), axis=0)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_table_pages",
        "page_table_stride",
        "num_splits",
        "min_tiles",
    ]
)
def pooled_decode_kernel(
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
    num_requests,
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
    BLOCK_R: tl.constexpr,
    IS_STRIDED: tl.constexpr,
):
    """num_requests * H programs, then those of the pool."""
    num_pairs = num_requests * H
    first, end = tl.program_id(0), tl.program_id(0) + 1
    if first >= num_pairs:
        num_positions = tl.zeros([], tl.int32)
        for first_request in range(0, num_requests, BLOCK_R):
            o_r = first_request + tl.arange(0, BLOCK_R)
            b_lens = tl.load(context_lens_ptr + o_r, mask=o_r < num_requests, other=0)
            b_count, b_longest = count_further_splits(b_lens, num_splits, min_tiles, H, BLOCK_N)
            num_positions += tl.sum(b_count * b_longest, axis=0)
        position, end_position = share_positions(num_positions, num_pairs)
        first, end = num_pairs, num_pairs
        begin = tl.zeros([], tl.int32)  # of the requests' positions
        num_counted = tl.where(num_positions > 0, num_requests, 0)
        for first_request in range(0, num_counted, BLOCK_R):
            o_r = first_request + tl.arange(0, BLOCK_R)
            b_lens = tl.load(context_lens_ptr + o_r, mask=o_r < num_requests, other=0)
            b_count, b_longest = count_further_splits(b_lens, num_splits, min_tiles, H, BLOCK_N)
            b_begin = begin + tl.cumsum(b_count * b_longest, axis=0) - b_count * b_longest
            first += count_before(position, b_begin, b_count, b_longest)
            end += count_before(end_position, b_begin, b_count, b_longest)
            begin += tl.sum(b_count * b_longest, axis=0)
    # Values moved out of this loop would take registers in the one over tiles.
    for i_item in tl.range(first, end, disable_licm=True):
        i_r, i_h, i_split = i_item // H, i_item % H, 0
        if i_item >= num_pairs:  # a further split: count those of the requests before
            i_r = tl.zeros([], tl.int32)
            begin = tl.zeros([], tl.int32)  # of the request's further splits
            num_passed = tl.zeros([], tl.int32)
            for first_request in range(0, num_requests, BLOCK_R):
                o_r = first_request + tl.arange(0, BLOCK_R)
                b_lens = tl.load(context_lens_ptr + o_r, mask=o_r < num_requests, other=0)
                b_count, _ = count_further_splits(b_lens, num_splits, min_tiles, H, BLOCK_N)
                b_end = num_passed + tl.cumsum(b_count, axis=0)
                m_before = (b_end <= i_item - num_pairs) & (o_r < num_requests)
                i_r += tl.sum(m_before.to(tl.int32), axis=0)
                begin = tl.maximum(begin, tl.max(tl.where(m_before, b_end, 0), axis=0))
                num_passed += tl.sum(b_count, axis=0)
            i_h = (i_item - num_pairs - begin) % H
            i_split = 1 + (i_item - num_pairs - begin) // H
        i_r = tl.cast(i_r, tl.int64)
        context_len = tl.load(context_lens_ptr + i_r).to(tl.int32)
        # Loads that need not wait for context_len go before the first use of it.
        b_q = load_queries(q_ptr, i_r, i_h, H, G, ROWS, D, D_PAD, M_PAD)
        p_table = page_table_ptr + i_r * page_table_stride
        pages = 0
        if IS_STRIDED:
            table_tokens = num_table_pages * PAGE_SIZE
            pages = load_pages(p_table, i_split * BLOCK_N, table_tokens, PAGE_SIZE, BLOCK_N)
        num_used = count_splits(tl.cdiv(context_len, BLOCK_N), num_splits, min_tiles)
        attend_split(
            b_q, pages, qkv_ptr, k_pool_ptr, v_pool_ptr, p_table,
            partial_ptr, log_weight_ptr, out_ptr, qkv_stride,
            context_len, num_used, num_splits, i_r, i_h, i_split,
            SCALE, H, G, ROWS, D, D_PAD, M_PAD, PAGE_SIZE, BLOCK_N, IS_STRIDED, False,
        )  # fmt: skip
