# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Paged attention of a few rows per request where page tables have room for many splits.

Few contexts use them. So a pool of programs shares the splits in use, in order of requests and
splits. The programs of a team, one for each key/value head, serve the same splits at the same
time: neighbours read the heads of the same tokens. A split counts as many positions as its
context's longest has tiles, and one for its start; a team has an even share of all positions, and
serves the splits that end in it: none has more to do than its share and one split. Every split
gives the bits that `paged_decode_kernel` gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.decode_kernel import attend_split, count_splits, load_queries
from graphs.kernels.attention.tile_kernel import load_pages

# These take lengths and no pointer to them: torch.compile believes that a kernel writes to whatever
# pointers went into a call whose result says where it stores.


@triton.jit
def weigh_splits(b_lens, num_splits, min_tiles, BLOCK_N: tl.constexpr):
    """Of contexts: the splits in use, and the positions of each."""
    b_tiles = tl.cdiv(b_lens.to(tl.int32), BLOCK_N)
    b_used = count_splits(b_tiles, num_splits, min_tiles)
    return b_used, tl.cdiv(b_tiles, b_used) + 1


@triton.jit
def share_positions(num_positions, H: tl.constexpr):
    """The positions of this program's team: from the first up to the second returned."""
    i_team = tl.program_id(0) // H
    num_teams = tl.num_programs(0) // H
    share = num_positions // num_teams
    rest = num_positions % num_teams  # as many teams have a position more
    first = i_team * share + tl.minimum(i_team, rest)
    return first, first + share + (i_team < rest).to(tl.int32)


@triton.jit
def count_ended(position, b_begin, b_used, b_weight):
    """How many of each request's splits, which begin at b_begin, end at `position` or before."""
    return tl.minimum(tl.maximum(position - b_begin, 0) // b_weight, b_used)


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
    """H programs for each team."""
    num_positions = tl.zeros([], tl.int32)
    for first_request in range(0, num_requests, BLOCK_R):
        o_r = first_request + tl.arange(0, BLOCK_R)
        m_r = o_r < num_requests
        b_lens = tl.load(context_lens_ptr + o_r, mask=m_r, other=0)
        b_used, b_weight = weigh_splits(b_lens, num_splits, min_tiles, BLOCK_N)
        num_positions += tl.sum(tl.where(m_r, b_used * b_weight, 0), axis=0)
    position, end_position = share_positions(num_positions, H)
    i_r, i_split = tl.zeros([], tl.int64), tl.zeros([], tl.int32)  # of the first split to serve
    num_served = tl.zeros([], tl.int32)
    begin = tl.zeros([], tl.int32)  # of the requests' positions
    for first_request in range(0, num_requests, BLOCK_R):
        o_r = first_request + tl.arange(0, BLOCK_R)
        m_r = o_r < num_requests
        b_lens = tl.load(context_lens_ptr + o_r, mask=m_r, other=0)
        b_used, b_weight = weigh_splits(b_lens, num_splits, min_tiles, BLOCK_N)
        b_used = tl.where(m_r, b_used, 0)
        b_end = begin + tl.cumsum(b_used * b_weight, axis=0)
        b_begin = b_end - b_used * b_weight
        b_ended = count_ended(position, b_begin, b_used, b_weight)
        num_served += tl.sum(count_ended(end_position, b_begin, b_used, b_weight) - b_ended, axis=0)
        i_r += tl.sum((m_r & (b_ended == b_used)).to(tl.int32), axis=0)
        i_split += tl.sum(tl.where(b_ended < b_used, b_ended, 0), axis=0)
        begin += tl.sum(b_used * b_weight, axis=0)
    i_h = tl.program_id(0) % H
    # Values moved out of this loop would take registers in the one over tiles.
    for _ in tl.range(0, num_served, disable_licm=True):
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
        i_split += 1
        is_last = i_split == num_used  # every request has a split: the next one has the next
        i_r += is_last.to(tl.int64)
        i_split = tl.where(is_last, 0, i_split)
