# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,index,assignment"
"""One row times a weight, with a whole block of weight rows in flight per program.

All programs run at once. Each takes every num_programs-th block of BLOCK_N weight rows, and
loads its next block, as PIECES tiles along K, ahead of the sums of this one. 16-bit weights stay
packed in pairs until they are multiplied, so that a block in flight takes half the registers.
The order of a sum is piece by piece along K, then over lanes, then over warps: it depends on
BLOCK_K and the number of warps alone.
"""

import triton
import triton.language as tl


@triton.jit
def load_weight_rows(
    p_weight,
    block,
    num_outputs,
    row_words,
    PIECES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE_WORDS: tl.constexpr,
):
    """The block's rows as PIECES tiles of PIECE_WORDS 32-bit words; past the last row, row 0."""
    o_row = block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_row = tl.where(o_row < num_outputs, o_row, 0).to(tl.int64)
    o_k = tl.arange(0, PIECE_WORDS)
    p_rows = p_weight + o_row[:, None] * row_words + o_k[None, :]
    tiles = ()
    for i_piece in tl.static_range(PIECES):
        p_tile = p_rows + i_piece * PIECE_WORDS
        if EVEN_K or i_piece < PIECES - 1:
            b_tile = tl.load(p_tile, eviction_policy="evict_first")
        else:
            m_k = (i_piece * PIECE_WORDS + o_k < row_words)[None, :]
            b_tile = tl.load(p_tile, mask=m_k, other=0, eviction_policy="evict_first")
        tiles += (b_tile,)
    return tiles


@triton.jit
def unpack(b_words, b_x):
    """The numbers of b_x's dtype in 32-bit words, the low half first, as fp32."""
    if b_x.dtype == tl.float32:
        b_numbers = b_words.to(tl.float32, bitcast=True)
    elif b_x.dtype == tl.bfloat16:
        b_low = (b_words << 16).to(tl.float32, bitcast=True)
        b_high = (b_words & -65536).to(tl.float32, bitcast=True)
        b_numbers = tl.interleave(b_low, b_high)
    else:
        b_low = b_words.to(tl.int16).to(b_x.dtype, bitcast=True).to(tl.float32)
        b_high = (b_words >> 16).to(tl.int16).to(b_x.dtype, bitcast=True).to(tl.float32)
        b_numbers = tl.interleave(b_low, b_high)
    return b_numbers


@triton.jit
def store_products(
    out_ptr,
    block,
    tiles,
    xs,
    num_outputs,
    PIECES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i_piece in tl.static_range(PIECES):
        b_x = xs[i_piece]
        b_weight = unpack(tiles[i_piece], b_x)
        b_sum = tl.fma(b_weight, b_x.to(tl.float32)[None, :], b_sum)
    o_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + o_n, tl.sum(b_sum, axis=1), mask=o_n < num_outputs)


@triton.jit
def one_row_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_outputs,
    depth,
    num_blocks,
    PIECES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORD_LEN: tl.constexpr,
):
    """out [num_outputs] = x [depth] times weight [num_outputs, depth] transposed.

    WORD_LEN: how many numbers of x's dtype make 32 bits; depth is a multiple of it. At most
    num_blocks programs.
    """
    PIECE_WORDS: tl.constexpr = BLOCK_K // WORD_LEN
    p_weight = weight_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    row_words = depth // WORD_LEN
    first = tl.program_id(0)
    step = tl.num_programs(0)
    tiles = load_weight_rows(
        p_weight, first, num_outputs, row_words, PIECES, EVEN_K, BLOCK_N, PIECE_WORDS
    )
    o_k = tl.arange(0, BLOCK_K)
    xs = ()
    for i_piece in tl.static_range(PIECES):
        m_k = i_piece * BLOCK_K + o_k < depth
        p_x = x_ptr + i_piece * BLOCK_K + o_k
        xs += (tl.load(p_x, mask=m_k, other=0.0, eviction_policy="evict_last"),)
    for block in tl.range(first, num_blocks - step, step, num_stages=1):
        next_tiles = load_weight_rows(
            p_weight, block + step, num_outputs, row_words, PIECES, EVEN_K, BLOCK_N, PIECE_WORDS
        )
        store_products(out_ptr, block, tiles, xs, num_outputs, PIECES, BLOCK_N, BLOCK_K)
        tiles = next_tiles
    last = first + (num_blocks - 1 - first) // step * step
    store_products(out_ptr, last, tiles, xs, num_outputs, PIECES, BLOCK_N, BLOCK_K)
