# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Pairs (row, slot) sorted by expert, and the tiles of the grouped products over them."""

import triton
import triton.language as tl


@triton.jit
def group_pairs_kernel(
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_rows,
    num_chunks,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
):
    """A stable counting sort, its last step: every pair finds its place.

    ids and ranks [T, TOP_K + 1] and counts [chunks, NUM_EXPERTS] are of `route_kernel`, a chunk
    is its ROWS rows; slot TOP_K, the shared expert, comes last. pairs [T * (TOP_K + 1)] gets
    row * (TOP_K + 1) + slot of each place. tiles [3, num_tiles] gets expert, first place and
    end of the expert's places; each tile covers TILE_ROWS places, expert -1 covers none.

    The first num_chunks programs place the pairs of a chunk, the others write tiles.
    """
    NUM_SLOTS: tl.constexpr = TOP_K + 1
    i_program = tl.program_id(0)
    o_e = tl.arange(0, EXPERTS_PADDED)
    m_e = o_e < NUM_EXPERTS
    b_counts_C = tl.zeros([CHUNKS_BLOCK, EXPERTS_PADDED], tl.int32)
    b_before_C = tl.zeros([CHUNKS_BLOCK, EXPERTS_PADDED], tl.int32)  # in earlier chunks
    for first in tl.range(0, num_chunks, CHUNKS_BLOCK, loop_unroll_factor=4):
        o_chunk = first + tl.arange(0, CHUNKS_BLOCK)
        p_counts = counts_ptr + o_chunk[:, None] * NUM_EXPERTS + o_e[None, :]
        m_counts = (o_chunk < num_chunks)[:, None] & m_e[None, :]
        b_block = tl.load(p_counts, mask=m_counts, other=0).to(tl.int32)
        b_counts_C += b_block
        b_before_C += tl.where((o_chunk < i_program)[:, None], b_block, 0)
    b_counts = tl.sum(b_counts_C, 0)
    b_before = tl.sum(b_before_C, 0)
    b_ends = tl.cumsum(b_counts, 0)
    b_starts = b_ends - b_counts
    if i_program < num_chunks:
        o_place = tl.arange(0, ROWS * SLOTS_PADDED)
        o_row = i_program * ROWS + o_place // SLOTS_PADDED
        o_slot = o_place % SLOTS_PADDED
        o_pair = o_row * NUM_SLOTS + o_slot
        m_pair = (o_row < num_rows) & (o_slot < NUM_SLOTS)
        m_routed = m_pair & (o_slot < TOP_K)
        b_ids = tl.load(ids_ptr + o_pair, mask=m_routed, other=0)
        b_ranks = tl.load(ranks_ptr + o_pair, mask=m_routed, other=0)
        b_places = tl.gather(b_starts + b_before, b_ids, 0) + b_ranks
        b_places = tl.where(m_routed, b_places, num_rows * TOP_K + o_row)
        tl.store(pairs_ptr + b_places, o_pair, mask=m_pair)
    else:
        o_tile = (i_program - num_chunks) * TILES_BLOCK + tl.arange(0, TILES_BLOCK)
        b_num_tiles = (b_counts + TILE_ROWS - 1) // TILE_ROWS
        b_tile_ends = tl.cumsum(b_num_tiles, 0)
        m_passed = (b_tile_ends[None, :] <= o_tile[:, None]) & m_e[None, :]
        b_experts = tl.sum(m_passed.to(tl.int32), 1)  # NUM_EXPERTS is the shared expert
        m_own = o_e[None, :] == b_experts[:, None]
        b_origins = b_starts - (b_tile_ends - b_num_tiles) * TILE_ROWS
        b_first = tl.sum(tl.where(m_own, b_origins[None, :], 0), 1) + o_tile * TILE_ROWS
        b_end = tl.sum(tl.where(m_own, b_ends[None, :], 0), 1)
        is_shared = b_experts == NUM_EXPERTS
        b_shared_tiles = o_tile - tl.sum(b_num_tiles)
        b_first = tl.where(is_shared, num_rows * TOP_K + b_shared_tiles * TILE_ROWS, b_first)
        b_end = tl.where(is_shared, num_rows * NUM_SLOTS, b_end)
        m_tile = o_tile < num_tiles
        tl.store(tiles_ptr + o_tile, tl.where(b_first < b_end, b_experts, -1), mask=m_tile)
        tl.store(tiles_ptr + num_tiles + o_tile, b_first, mask=m_tile)
        tl.store(tiles_ptr + 2 * num_tiles + o_tile, b_end, mask=m_tile)
