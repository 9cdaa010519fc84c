# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Drawing a token from a truncated distribution without sorting it.

Every truncation keeps the tokens whose places lie before some end. A draw from more tokens than
those is still right if it lies before the end itself; otherwise the next draw is from the tokens
before it.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.candidates_kernel import is_top_k_small
from graphs.kernels.sample.rounds_kernel import follow_rounds, min_p_end, wanted_mass
from graphs.kernels.sample.rows import ROW_POINTERS
from graphs.kernels.sample.scan_kernel import PADDING_MAGNITUDE, scan
from graphs.kernels.sample.select_kernel import bisect_places, find_top_k_end

# With Gumbel noise a rejection halves the mass that is too much, or better. Other noise may take
# one token away at a time.
MAX_DRAWS = tl.constexpr(12)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def draw_rows_kernel(
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
    counts_ptr,
    token_ids_ptr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One row a program: draw before the end of top-k and min-p until the nucleus has the draw."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    i_row = tl.program_id(0)
    p_scaled = scaled_ptr + i_row.to(tl.int64) * VOCAB
    seed = tl.load(seed_ptr + i_row)
    position = tl.load(position_ptr + i_row)
    is_greedy = tl.load(is_greedy_ptr + i_row).to(tl.int32)
    top_k = tl.load(top_k_ptr + i_row)
    if is_top_k_small(top_k, VOCAB) & (tl.load(counts_ptr + i_row) <= ROOM):
        return  # drawn from its candidates
    top_p = tl.load(top_p_ptr + i_row)
    if top_k < VOCAB:
        end = find_top_k_end(p_scaled, top_k.to(tl.int32), VOCAB, ID_BITS, BLOCK, STAGES)
        end_draw = tl.minimum(end, min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS))
        mass, _, drawn = scan(
            p_scaled,
            seed,
            position,
            is_greedy,
            0,
            VOCAB,
            end,
            end_draw,
            VOCAB,
            ID_BITS,
            BLOCK,
            STAGES,
        )
        wanted = wanted_mass(top_p, mass)
        rejected = tl.full([], NEVER, tl.int64)
    else:
        wanted, mass, rejected, drawn = follow_rounds(
            i_row,
            top_p,
            mass_ptr,
            best_ptr,
            drawn_ptr,
            VOCAB,
            ID_BITS,
            NUM_ROUNDS,
            NUM_ROUNDS,
            NUM_SPLITS,
            SPLITS_PADDED,
        )
    num_draws = 0
    # No name in the loop may take over another's value as it is: Triton carries a name only if a
    # trial visit of the body gives it a value it did not have before the loop, and a first
    # `drawn = before` of equal values gives none.
    while (mass >= wanted) & (num_draws < MAX_DRAWS):
        # Looking at what is before a draw also makes the next one, should this be rejected.
        mass, _, before = scan(
            p_scaled,
            seed,
            position,
            is_greedy,
            0,
            VOCAB,
            drawn,
            drawn,
            VOCAB,
            ID_BITS,
            BLOCK,
            STAGES,
        )
        rejected = tl.where(mass >= wanted, drawn, rejected)
        drawn = tl.where(mass >= wanted, before, drawn)
        num_draws += 1
    if mass >= wanted:
        low = tl.full([], 0, tl.int64)
        last = bisect_places(p_scaled, low, rejected, wanted, True, VOCAB, ID_BITS, BLOCK, STAGES)
        end = last + 1
        _, _, drawn = scan(
            p_scaled,
            seed,
            position,
            is_greedy,
            0,
            VOCAB,
            end,
            end,
            VOCAB,
            ID_BITS,
            BLOCK,
            STAGES,
        )
    # Only a row without a best token of score 0 may have no draw.
    i_token = tl.where(drawn < NEVER, drawn & ((1 << ID_BITS) - 1), 0)
    tl.store(token_ids_ptr + i_row, i_token)
