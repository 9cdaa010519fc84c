# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""A pass over a row: which tokens come before a place, their mass, and the draw among them.

Scores are at most 0, so a score's magnitude, the bits of its absolute value, grows as the score
falls. A token's place, magnitude << ID_BITS | id as int64, is unique, and places ascend in the
order that tokens rank. Counts and masses are integers, so no block and no order of additions
changes any of them.

A draw needs the noise of few tokens. Noise is less than -log(u) of its uniform value u, so a
token is worse than a noisy score found before if u is beyond exp(score - that): one product, as
mass needs exp(score) anyway. Blocks where no token comes near need no logarithms, and those of
low scores alone no words. Which are left out changes nothing: what is equal is near.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.noise_kernel import (
    LOWEST_NOISE,
    LOWEST_UNIFORM,
    block_words,
    gumbel_from_uniform,
    uniform_from_words,
)

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
PADDING_MAGNITUDE = tl.constexpr(0x7F800001)  # right behind that of -inf
MASS_SCALE = tl.constexpr(2.0**40)
# Limits are a hundredth higher than they have to be: exp, noise and sums are 1e-4 off at most.
LIMIT_SCALE = tl.constexpr(1.01)


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
def any_of(m_token):
    """Whether the mask is true anywhere, the same in all threads."""
    return tl.max(m_token.to(tl.int32)) > 0


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
):
    """Token ids first .. last - 1: the mass before end_mass, and the draw before end_draw.

    first is a multiple of 4. The draw is the largest noisy score and its place, NEVER where no
    token is before end_draw, or none that may be the row's draw.
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    o_block = tl.arange(0, BLOCK)
    b_mass = tl.zeros([BLOCK], tl.int64)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_drawn = tl.full([BLOCK], NEVER, tl.int64)
    # The row's best token scores 0 and is in every draw of the row, be it in this split or not.
    floor = tl.full([], LOWEST_NOISE, tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        o_id = start + o_block
        b_scaled, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
        m_mass = distance_from(end_mass, b_magnitude, o_id, ID_BITS) < 0
        b_mass += tl.where(m_mass, mass_of(b_scaled), 0)
        m_draw = distance_from(end_draw, b_magnitude, o_id, ID_BITS) < 0
        b_limit = tl.where(m_draw, tl.exp(b_scaled) * (tl.exp(-floor) * LIMIT_SCALE), 0.0)
        if any_of(b_limit >= LOWEST_UNIFORM):
            b_uniform = tl.full([BLOCK], 1.0, tl.float32)
            if is_greedy == 0:
                b_uniform = uniform_from_words(block_words(seed, position, start, BLOCK))
            m_near = b_uniform <= b_limit
            if any_of(m_near):
                b_noisy = b_scaled
                if is_greedy == 0:
                    b_noisy = b_scaled + gumbel_from_uniform(b_uniform)
                m_better = m_near & (b_noisy > b_best)
                b_best = tl.where(m_better, b_noisy, b_best)
                b_place = (b_magnitude.to(tl.int64) << ID_BITS) | o_id
                b_drawn = tl.where(m_better, b_place, b_drawn)
                floor = tl.maximum(floor, tl.max(b_best))
    best, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    return tl.sum(b_mass), best, drawn
