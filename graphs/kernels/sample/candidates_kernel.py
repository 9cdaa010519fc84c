# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Rows with a small top-k: their few candidates, found on the whole GPU, and the draw among them.

The best of every group of tokens are tokens themselves, so the top_k-th of those bounds the place
of the row's top_k-th. What is left before the bound mostly fits in one program's registers. Rows
where it does not are left to the passes over whole rows.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.noise_kernel import gumbel_noise
from graphs.kernels.sample.rounds_kernel import min_p_end, wanted_mass
from graphs.kernels.sample.rows import ROW_POINTERS
from graphs.kernels.sample.scan_kernel import (
    PADDING_MAGNITUDE,
    choose_best,
    load_scores,
    mass_of,
)
from graphs.kernels.sample.select_kernel import MAGNITUDE_BITS, find_two_of_lanes

MAX_TOP_K = tl.constexpr(512)  # a quarter of the groups of a large vocabulary
SIGN_BIT = tl.constexpr(-(2**31))


@triton.jit
def is_top_k_small(top_k, VOCAB: tl.constexpr):
    """Whether a row's candidates are looked for."""
    return (top_k < VOCAB) & (top_k <= MAX_TOP_K)


@triton.jit
def load_places(p_scaled, o_id, VOCAB: tl.constexpr, ID_BITS: tl.constexpr):
    """NEVER or more behind the vocabulary."""
    _, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
    return (b_magnitude.to(tl.int64) << ID_BITS) | o_id


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def group_minima_kernel(
    scaled_ptr,
    top_k_ptr,
    minima_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The first place of each group of a split, NEVER in groups behind the vocabulary."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    i_row = tl.program_id(0) // NUM_SPLITS
    first = (tl.program_id(0) % NUM_SPLITS) * SPLIT
    if is_top_k_small(tl.load(top_k_ptr + i_row), VOCAB):
        p_scaled = scaled_ptr + i_row.to(tl.int64) * VOCAB
        b_lanes = tl.full([BLOCK], NEVER, tl.int64)
        for start in tl.range(first, tl.minimum(first + SPLIT, VOCAB), BLOCK, num_stages=3):
            b_place = load_places(p_scaled, start + tl.arange(0, BLOCK), VOCAB, ID_BITS)
            b_lanes = tl.minimum(b_lanes, b_place)
        b_groups = tl.min(tl.reshape(b_lanes, [GROUPS, BLOCK // GROUPS]), axis=1)
        tl.store(minima_ptr + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), b_groups)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def find_bounds_kernel(
    top_k_ptr,
    minima_ptr,
    bounds_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
):
    """The top_k-th of a row's minima, NEVER or more if they are fewer; no candidates yet."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    i_row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + i_row)
    if is_top_k_small(top_k, VOCAB):
        o_group = tl.arange(0, GROUPS_PADDED)
        m_group = o_group < NUM_GROUPS
        b_minima = tl.load(minima_ptr + i_row * NUM_GROUPS + o_group, mask=m_group, other=NEVER)
        bound, _ = find_two_of_lanes(b_minima, top_k, 0, ID_BITS)
        tl.store(bounds_ptr + i_row, bound)
        tl.store(counts_ptr + i_row, 0)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def collect_kernel(
    scaled_ptr,
    top_k_ptr,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The places up to the bound, int64 [R, ROOM], in any order; those beyond ROOM only count."""
    i_row = tl.program_id(0) // NUM_SPLITS
    first = (tl.program_id(0) % NUM_SPLITS) * SPLIT
    if is_top_k_small(tl.load(top_k_ptr + i_row), VOCAB):
        bound = tl.load(bounds_ptr + i_row)
        p_scaled = scaled_ptr + i_row.to(tl.int64) * VOCAB
        p_candidates = candidates_ptr + i_row * ROOM
        for start in tl.range(first, tl.minimum(first + SPLIT, VOCAB), BLOCK, num_stages=3):
            o_id = start + tl.arange(0, BLOCK)
            b_place = load_places(p_scaled, o_id, VOCAB, ID_BITS)
            m_candidate = (b_place <= bound) & (o_id < VOCAB)
            b_count = m_candidate.to(tl.int32)
            num_candidates = tl.sum(b_count)
            if num_candidates > 0:
                o_free = tl.atomic_add(counts_ptr + i_row, num_candidates)
                o_to = o_free + tl.cumsum(b_count, 0) - 1
                tl.store(p_candidates + o_to, b_place, mask=m_candidate & (o_to < ROOM))


@triton.jit
def find_mass_end(b_place, b_mass, wanted, ID_BITS: tl.constexpr):
    """The end behind the last place before which there is less than the mass wanted."""
    last = tl.full([], 0, tl.int64)
    bit = tl.full([], 1, tl.int64) << (MAGNITUDE_BITS + ID_BITS - 1)
    for _ in range(MAGNITUDE_BITS + ID_BITS):
        mass = tl.sum(tl.where(b_place < last + bit, b_mass, 0))
        last += tl.where(mass < wanted, bit, 0)
        bit >>= 1
    return last + 1


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def draw_candidates_kernel(
    seed_ptr,
    position_ptr,
    is_greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    counts_ptr,
    candidates_ptr,
    token_ids_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One row a program, all its candidates at hand: its token, if they are all there."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    i_row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + i_row)
    num_candidates = tl.load(counts_ptr + i_row)
    if is_top_k_small(top_k, VOCAB) & (num_candidates <= ROOM):
        o_room = tl.arange(0, ROOM)
        m_room = o_room < num_candidates
        b_place = tl.load(candidates_ptr + i_row * ROOM + o_room, mask=m_room, other=NEVER)
        b_magnitude = (b_place >> ID_BITS).to(tl.int32)
        b_scaled = (b_magnitude | SIGN_BIT).to(tl.float32, bitcast=True)
        b_scaled = tl.where(m_room, b_scaled, float("-inf"))
        b_id = (b_place & ((1 << ID_BITS) - 1)).to(tl.int32)
        last, _ = find_two_of_lanes(b_place, top_k, 0, ID_BITS)
        end = last + 1
        b_mass = tl.where(m_room & (b_place < end), mass_of(b_scaled), 0)
        total = tl.sum(b_mass)
        wanted = wanted_mass(tl.load(top_p_ptr + i_row), total)
        if wanted <= total:
            end = tl.minimum(end, find_mass_end(b_place, b_mass, wanted, ID_BITS))
        end = tl.minimum(end, min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS))
        b_noise = gumbel_noise(tl.load(seed_ptr + i_row), tl.load(position_ptr + i_row), b_id)
        b_noise = tl.where(tl.load(is_greedy_ptr + i_row) == 0, b_noise, 0.0)
        m_draw = m_room & (b_place < end)
        b_noisy = tl.where(m_draw, b_scaled + b_noise, float("-inf"))
        b_noisy = tl.where(b_noisy == b_noisy, b_noisy, float("-inf"))
        _, drawn = choose_best(b_noisy, tl.where(m_draw, b_place, NEVER), VOCAB, ID_BITS)
        i_token = tl.where(drawn < NEVER, drawn & ((1 << ID_BITS) - 1), 0)
        tl.store(token_ids_ptr + i_row, i_token)
