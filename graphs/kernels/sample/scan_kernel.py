# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""A pass over a row: which tokens come before a place, their mass, and the draw among them.

Scores are at most 0, so a score's magnitude, the bits of its absolute value, grows as the score
falls. A token's place, magnitude << ID_BITS | id as int64, is unique, and places ascend in the
order that tokens rank. Counts and masses are integers, so no block and no order of additions
changes any of them.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.noise_kernel import block_noise

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
PADDING_MAGNITUDE = tl.constexpr(0x7F800001)  # right behind that of -inf
MASS_SCALE = tl.constexpr(2.0**40)


@triton.jit
def load_scores(p_scaled, o_id, VOCAB: tl.constexpr):
    """Scores and magnitudes; what is no number at most 0 counts as -inf."""
    b_scaled = tl.load(p_scaled + o_id, mask=o_id < VOCAB, other=0.0)
    b_scaled = tl.where(b_scaled <= 0.0, b_scaled, float("-inf"))
    b_magnitude = b_scaled.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    return b_scaled, tl.where(o_id < VOCAB, b_magnitude, PADDING_MAGNITUDE)


@triton.jit
def distance_from(end, b_magnitude, o_id, ID_BITS: tl.constexpr):
    """int32, negative for places before `end`: a comparison that builds no places."""
    magnitude = (end >> ID_BITS).to(tl.int32)
    id_end = (end & ((1 << ID_BITS) - 1)).to(tl.int32)
    return b_magnitude - magnitude - (o_id < id_end).to(tl.int32)


@triton.jit
def mass_of(b_scaled):
    """Integer probability mass, in units of 2^-40 of the best token's."""
    return (tl.exp(b_scaled) * MASS_SCALE).to(tl.int64)


@triton.jit
def choose_best(b_noisy, b_place, VOCAB: tl.constexpr, ID_BITS: tl.constexpr):
    """The largest noisy score and its place, of equal ones the lowest id; NEVER marks no token."""
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    b_id = b_place & ((1 << ID_BITS) - 1)
    best = tl.max(b_noisy)
    m_best = (b_noisy == best) & (b_place < NEVER)
    i_best = tl.min(tl.where(m_best, b_id, VOCAB))
    return best, tl.min(tl.where(m_best & (b_id == i_best), b_place, NEVER))


@triton.jit
def scan(
    p_scaled,
    seed,
    position,
    is_greedy,
    first,
    last,
    end_mass,
    end_draw,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Token ids first .. last - 1: the mass before end_mass, and the draw before end_draw.

    first is a multiple of 4. The draw is the largest noisy score and its place, NEVER where no
    token is before end_draw. IS_FIRST: most blocks have tokens before end_draw, so that none is
    looked at for that alone.
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    o_block = tl.arange(0, BLOCK)
    b_mass = tl.zeros([BLOCK], tl.int64)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_drawn = tl.full([BLOCK], NEVER, tl.int64)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        o_id = start + o_block
        b_scaled, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
        m_mass = distance_from(end_mass, b_magnitude, o_id, ID_BITS) < 0
        b_mass += tl.where(m_mass, mass_of(b_scaled), 0)
        b_distance = distance_from(end_draw, b_magnitude, o_id, ID_BITS)
        m_draw = b_distance < 0
        is_noisy = is_greedy == 0
        if not IS_FIRST:
            is_noisy = is_noisy & (tl.min(b_distance) < 0)
        b_noisy = b_scaled
        if is_noisy:
            b_noisy = b_scaled + block_noise(seed, position, start, BLOCK)
        b_noisy = tl.where(b_noisy == b_noisy, b_noisy, float("-inf"))
        m_better = m_draw & ((b_noisy > b_best) | (b_drawn == NEVER))
        b_best = tl.where(m_better, b_noisy, b_best)
        b_place = (b_magnitude.to(tl.int64) << ID_BITS) | o_id
        b_drawn = tl.where(m_better, b_place, b_drawn)
    best, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    return tl.sum(b_mass), best, drawn
