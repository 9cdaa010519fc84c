# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Drawing a token from a truncated distribution without sorting it.

Every truncation keeps the tokens whose places lie before some end. A draw from more tokens than
those is still right if it lies before the end itself; otherwise the next draw is from the tokens
before it.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.scan_kernel import (
    MAGNITUDE_MASK,
    PADDING_MAGNITUDE,
    choose_best,
    scan,
)
from graphs.kernels.sample.select_kernel import bisect_places, find_top_k_end

# With Gumbel noise a rejection halves the mass that is too much, or better. Other noise may take
# one token away at a time.
MAX_DRAWS = tl.constexpr(12)


@triton.jit
def min_p_end(log_min_p, ID_BITS: tl.constexpr):
    """The end behind all scores of at least log_min_p <= 0."""
    magnitude = log_min_p.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    return (magnitude.to(tl.int64) + 1) << ID_BITS


@triton.jit
def survey_splits_kernel(
    scaled_ptr,
    noise_ptr,
    is_greedy_ptr,
    top_k_ptr,
    log_min_p_ptr,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The first scan of rows without top-k: one program scans SPLIT tokens of a row.

    mass (int64), best (fp32) and drawn (int64) are [R, NUM_SPLITS]; see `scan`.
    """
    i_row = tl.program_id(0) // NUM_SPLITS
    i_split = tl.program_id(0) % NUM_SPLITS
    o_row = i_row.to(tl.int64) * VOCAB
    if tl.load(top_k_ptr + i_row) >= VOCAB:
        mass, best, drawn = scan(
            scaled_ptr + o_row,
            noise_ptr + o_row,
            tl.load(is_greedy_ptr + i_row).to(tl.int32),
            i_split * SPLIT,
            tl.minimum((i_split + 1) * SPLIT, VOCAB),
            tl.full([], PADDING_MAGNITUDE << ID_BITS, tl.int64),
            min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS),
            VOCAB,
            ID_BITS,
            BLOCK,
            1,
        )
        tl.store(mass_ptr + tl.program_id(0), mass)
        tl.store(best_ptr + tl.program_id(0), best)
        tl.store(drawn_ptr + tl.program_id(0), drawn)


@triton.jit
def gather_splits(
    i_row,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """A row's mass, and the place of its draw, from those of its splits."""
    o_split = i_row * NUM_SPLITS + tl.arange(0, SPLITS_PADDED)
    m_split = tl.arange(0, SPLITS_PADDED) < NUM_SPLITS
    b_mass = tl.load(mass_ptr + o_split, mask=m_split, other=0)
    b_best = tl.load(best_ptr + o_split, mask=m_split, other=float("-inf"))
    b_drawn = tl.load(drawn_ptr + o_split, mask=m_split, other=PADDING_MAGNITUDE << ID_BITS)
    _, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    return tl.sum(b_mass), drawn


@triton.jit
def draw_rows_kernel(
    scaled_ptr,
    noise_ptr,
    is_greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    mass_ptr,
    best_ptr,
    drawn_ptr,
    token_ids_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """One row a program: draw before the end of top-k and min-p until the nucleus has the draw."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    i_row = tl.program_id(0)
    p_scaled = scaled_ptr + i_row.to(tl.int64) * VOCAB
    p_noise = noise_ptr + i_row.to(tl.int64) * VOCAB
    is_greedy = tl.load(is_greedy_ptr + i_row).to(tl.int32)
    top_k = tl.load(top_k_ptr + i_row)
    top_p = tl.load(top_p_ptr + i_row)
    if top_k < VOCAB:
        end = find_top_k_end(p_scaled, top_k.to(tl.int32), VOCAB, ID_BITS, BLOCK, STAGES)
        end_draw = tl.minimum(end, min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS))
        total, _, drawn = scan(
            p_scaled, p_noise, is_greedy, 0, VOCAB, end, end_draw, VOCAB, ID_BITS, BLOCK, STAGES
        )
    else:
        total, drawn = gather_splits(
            i_row, mass_ptr, best_ptr, drawn_ptr, VOCAB, ID_BITS, NUM_SPLITS, SPLITS_PADDED
        )
    if top_p < 1.0:
        wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
        # Two names for one value would be one inside the loop: Triton carries only the names whose
        # value a first visit of the body changes.
        mass, before, num_draws = wanted, tl.minimum(drawn, NEVER), 0
        while (mass >= wanted) & (num_draws < MAX_DRAWS):
            # Looking at what is before a draw also makes the next one, should this be rejected.
            drawn = before
            mass, _, before = scan(
                p_scaled, p_noise, is_greedy, 0, VOCAB, drawn, drawn, VOCAB, ID_BITS, BLOCK, STAGES
            )
            num_draws += 1
        if mass >= wanted:
            low = tl.full([], 0, tl.int64)
            last = bisect_places(p_scaled, low, drawn, wanted, True, VOCAB, ID_BITS, BLOCK, STAGES)
            end = last + 1
            _, _, drawn = scan(
                p_scaled, p_noise, is_greedy, 0, VOCAB, end, end, VOCAB, ID_BITS, BLOCK, STAGES
            )
    # Only a row without a best token of score 0 may have no draw.
    i_token = tl.where(drawn < NEVER, drawn & ((1 << ID_BITS) - 1), 0)
    tl.store(token_ids_ptr + i_row, i_token)
