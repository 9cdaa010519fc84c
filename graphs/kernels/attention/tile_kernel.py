# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""One step of online softmax attention over a tile of the paged context, for every kernel here."""

from __future__ import annotations

import triton
import triton.language as tl

# Below any score, and finite: rows that have seen nothing yet must not subtract infinities.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def load_pages(
    page_table_ptr, first_token, token_limit, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The page of the tile from first_token on, or where tiles do not divide pages, of its tokens.

    Loops load the next tile's before they use this one's: loaded beside its use, the page would
    be pipelined as well, and the keys and values behind it have fewer stages.
    """
    if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page
        p_page = page_table_ptr + first_token // PAGE_SIZE
        pages = tl.load(p_page, mask=first_token < token_limit, other=0)
    else:
        o_tokens = first_token + tl.arange(0, BLOCK_N)
        p_page = page_table_ptr + o_tokens // PAGE_SIZE
        pages = tl.load(p_page, mask=o_tokens < token_limit, other=0)
    return pages


@triton.jit
def load_tile(
    pool_ptr,
    pages,
    first_token,
    m_tokens,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys or values [BLOCK_N, D_PAD]; masked, tokens outside m_tokens are zero, never stale."""
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, D_PAD)
    if PAGE_SIZE % BLOCK_N == 0:  # one 64-bit base, constant offsets
        pool_ptr += (pages * PAGE_SIZE + first_token % PAGE_SIZE) * (H * D)
        p_tile = pool_ptr + (o_n[:, None] * (H * D) + o_d[None, :])
    else:
        o_tokens = pages * PAGE_SIZE + (first_token + o_n) % PAGE_SIZE
        p_tile = pool_ptr + o_tokens[:, None] * (H * D) + o_d[None, :]
    if MASKED:
        if D == D_PAD:
            return tl.load(p_tile, mask=m_tokens[:, None], other=0.0)
        return tl.load(p_tile, mask=m_tokens[:, None] & (o_d < D)[None, :], other=0.0)
    if D == D_PAD:
        return tl.load(p_tile)
    return tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def attend_tile(
    b_q,
    b_max,
    b_sum,
    b_acc,
    b_visible,
    k_ptr,
    v_ptr,
    pages,
    first_token,
    token_limit,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take BLOCK_N tokens into the running maximum, sum and accumulator of M query rows.

    b_q [M, D_PAD]; row m sees the tokens below b_visible[m], and no token at or past
    token_limit is read. `pages` as from load_pages. Not MASKED: every row sees the whole tile.
    SCALE is the softmax scale times log2(e): scores are powers of two.
    """
    o_n = first_token + tl.arange(0, BLOCK_N)
    m_n = o_n < token_limit
    b_k = load_tile(k_ptr, pages, first_token, m_n, H, D, D_PAD, PAGE_SIZE, BLOCK_N, MASKED)
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASKED:
        b_score = tl.where(o_n[None, :] < b_visible[:, None], b_score, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1) * SCALE)
    b_p = tl.exp2(b_score * SCALE - b_new_max[:, None])
    b_decay = tl.exp2(b_max - b_new_max)
    b_sum = b_sum * b_decay + tl.sum(b_p, axis=1)
    b_v = load_tile(v_ptr, pages, first_token, m_n, H, D, D_PAD, PAGE_SIZE, BLOCK_N, MASKED)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    return b_new_max, b_sum, b_acc
