# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The first rounds of drawing for rows without top-k, each on the whole GPU.

Round 0 draws from all tokens, every later one from those before the draw of the round before it,
in rows whose nucleus does not have that draw.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.rows import ROW_POINTERS
from graphs.kernels.sample.scan_kernel import (
    MAGNITUDE_MASK,
    PADDING_MAGNITUDE,
    choose_best,
    scan,
)


@triton.jit
def min_p_end(log_min_p, ID_BITS: tl.constexpr):
    """The end behind all scores of at least log_min_p <= 0."""
    magnitude = log_min_p.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    return (magnitude.to(tl.int64) + 1) << ID_BITS


@triton.jit
def wanted_mass(top_p, total):
    """The mass that ends a nucleus: a draw with as much before it is none; `total` is not enough
    without top-p.
    """
    wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.where(top_p < 1.0, tl.maximum(wanted, 1), total + 1)


@triton.jit
def gather_splits(
    first,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """The mass of a row's round, and the place of its draw, from those of its splits."""
    o_split = first + tl.arange(0, SPLITS_PADDED)
    m_split = tl.arange(0, SPLITS_PADDED) < NUM_SPLITS
    b_mass = tl.load(mass_ptr + o_split, mask=m_split, other=0)
    b_best = tl.load(best_ptr + o_split, mask=m_split, other=float("-inf"))
    b_drawn = tl.load(drawn_ptr + o_split, mask=m_split, other=PADDING_MAGNITUDE << ID_BITS)
    _, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    return tl.sum(b_mass), drawn


@triton.jit
def follow_rounds(
    i_row,
    top_p,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    ROUNDS: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """A row after ROUNDS of its NUM_ROUNDS rounds: the mass wanted, the mass last found, the place
    of the last draw rejected (NEVER for none), and that of the draw to look at next, or, where
    less than the mass wanted was found, of the row's token.
    """
    first = i_row * (NUM_ROUNDS * NUM_SPLITS)
    mass, drawn = gather_splits(
        first, mass_ptr, best_ptr, drawn_ptr, VOCAB, ID_BITS, NUM_SPLITS, SPLITS_PADDED
    )
    wanted = wanted_mass(top_p, mass)
    rejected = tl.full([], PADDING_MAGNITUDE << ID_BITS, tl.int64)
    for i_round in tl.static_range(1, ROUNDS):
        if mass >= wanted:
            mass, before = gather_splits(
                first + i_round * NUM_SPLITS,
                mass_ptr,
                best_ptr,
                drawn_ptr,
                VOCAB,
                ID_BITS,
                NUM_SPLITS,
                SPLITS_PADDED,
            )
            rejected = tl.where(mass >= wanted, drawn, rejected)
            drawn = tl.where(mass >= wanted, before, drawn)
    return wanted, mass, rejected, drawn


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def scan_splits_kernel(
    scaled_ptr,
    seed_ptr,
    position_ptr,
    is_greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """A round of the rows without top-k that need it: one program scans SPLIT tokens of a row.

    mass (int64), best (fp32) and drawn (int64) are [R, NUM_ROUNDS, NUM_SPLITS]; see `scan`.
    """
    i_row = tl.program_id(0) // NUM_SPLITS
    i_split = tl.program_id(0) % NUM_SPLITS
    o_row = i_row.to(tl.int64) * VOCAB
    is_needed = tl.load(top_k_ptr + i_row) >= VOCAB
    end_mass = tl.full([], PADDING_MAGNITUDE << ID_BITS, tl.int64)
    end_draw = min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS)
    if ROUND > 0:
        top_p = tl.load(top_p_ptr + i_row)
        is_needed = is_needed & (top_p < 1.0)
        if is_needed:
            wanted, mass, _, end_draw = follow_rounds(
                i_row,
                top_p,
                mass_ptr,
                best_ptr,
                drawn_ptr,
                VOCAB,
                ID_BITS,
                ROUND,
                NUM_ROUNDS,
                NUM_SPLITS,
                SPLITS_PADDED,
            )
            end_mass = end_draw
            is_needed = mass >= wanted
    if is_needed:
        mass, best, drawn = scan(
            scaled_ptr + o_row,
            tl.load(seed_ptr + i_row),
            tl.load(position_ptr + i_row),
            tl.load(is_greedy_ptr + i_row).to(tl.int32),
            i_split * SPLIT,
            tl.minimum((i_split + 1) * SPLIT, VOCAB),
            end_mass,
            end_draw,
            VOCAB,
            ID_BITS,
            BLOCK,
            3 if ROUND == 0 else 1,
        )
        o_split = (i_row * NUM_ROUNDS + ROUND) * NUM_SPLITS + i_split
        tl.store(mass_ptr + o_split, mass)
        tl.store(best_ptr + o_split, best)
        tl.store(drawn_ptr + o_split, drawn)
