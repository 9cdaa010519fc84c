# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The place at which a count or a mass is reached, by passes over a row."""

import triton
import triton.language as tl

from graphs.kernels.sample.scan_kernel import (
    PADDING_MAGNITUDE,
    distance_from,
    load_scores,
    mass_of,
)

MAGNITUDE_BITS = tl.constexpr(31)
MAX_ROUNDS = tl.constexpr(8)  # two or three for top_k far below the number of lanes


@triton.jit
def find_lane_minima(
    p_scaled,
    low,
    high,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of the ids equal modulo BLOCK, the first place in [low, high), NEVER where there is none.

    Also how many places are before low, and how many in [low, high).
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    o_block = tl.arange(0, BLOCK)
    b_lanes = tl.full([BLOCK], NEVER, tl.int64)
    b_before = tl.zeros([BLOCK], tl.int32)
    b_within = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
        o_id = start + o_block
        _, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
        b_place = (b_magnitude.to(tl.int64) << ID_BITS) | o_id
        m_within = (b_place >= low) & (b_place < high)
        b_lanes = tl.minimum(b_lanes, tl.where(m_within, b_place, NEVER))
        b_before += (b_place < low).to(tl.int32)
        b_within += m_within.to(tl.int32)
    return b_lanes, tl.sum(b_before), tl.sum(b_within)


@triton.jit
def find_two_of_lanes(b_lanes, rank_a, rank_b, ID_BITS: tl.constexpr):
    """The rank-th smallest of b_lanes for two ranks from 1 on, bit by bit; 0 for ranks below 1."""
    place_a = tl.full([], 0, tl.int64)
    place_b = tl.full([], 0, tl.int64)
    bit = tl.full([], 1, tl.int64) << (MAGNITUDE_BITS + ID_BITS - 1)
    for _ in range(MAGNITUDE_BITS + ID_BITS):
        num_a = tl.sum((b_lanes < place_a + bit).to(tl.int32))
        num_b = tl.sum((b_lanes < place_b + bit).to(tl.int32))
        place_a += tl.where(num_a < rank_a, bit, 0)
        place_b += tl.where(num_b < rank_b, bit, 0)
        bit >>= 1
    return place_a, place_b


@triton.jit
def weigh(b_scaled, m_before, BY_MASS: tl.constexpr):
    """The masses of the tokens in m_before, or 1 for each."""
    return tl.where(m_before, mass_of(b_scaled), 0) if BY_MASS else m_before.to(tl.int32)


@triton.jit
def bisect_places(
    p_scaled,
    low,
    high,
    limit,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The last place in [low, high) before which less than `limit` lies: mass, or tokens.

    That is so at low and not at high. A pass over the scores quarters what is between.
    """
    WEIGHT: tl.constexpr = tl.int64 if BY_MASS else tl.int32
    o_block = tl.arange(0, BLOCK)
    while high - low > 1:
        step = tl.maximum((high - low) >> 2, 1)
        b_1 = tl.zeros([BLOCK], WEIGHT)
        b_2 = tl.zeros([BLOCK], WEIGHT)
        b_3 = tl.zeros([BLOCK], WEIGHT)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=STAGES):
            o_id = start + o_block
            b_scaled, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
            b_distance_1 = distance_from(low + step, b_magnitude, o_id, ID_BITS)
            b_distance_2 = distance_from(low + 2 * step, b_magnitude, o_id, ID_BITS)
            b_distance_3 = distance_from(low + 3 * step, b_magnitude, o_id, ID_BITS)
            b_1 += weigh(b_scaled, b_distance_1 < 0, BY_MASS)
            b_2 += weigh(b_scaled, b_distance_2 < 0, BY_MASS)
            b_3 += weigh(b_scaled, b_distance_3 < 0, BY_MASS)
        # The number of the three that hold less than the limit: they ascend.
        num_low = (tl.sum(b_1) < limit).to(tl.int64) + (tl.sum(b_2) < limit).to(tl.int64)
        num_low += (tl.sum(b_3) < limit).to(tl.int64)
        high = tl.where(num_low < 3, tl.minimum(high, low + (num_low + 1) * step), high)
        low += num_low * step
    return low


@triton.jit
def find_top_k_end(
    p_scaled,
    top_k,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The end behind the first top_k places, 1 <= top_k < VOCAB.

    The best of every lane bound the place from both sides: with `hidden` tokens that are not
    their lane's best, the lanes' r-th best has a rank of r to r + hidden.
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    low = tl.full([], 0, tl.int64)
    high = tl.full([], NEVER, tl.int64)
    num_rounds = 0
    while (top_k <= BLOCK // 2) & (num_rounds < MAX_ROUNDS) & (high - low > 1):
        b_lanes, num_before, num_within = find_lane_minima(
            p_scaled, low, high, VOCAB, ID_BITS, BLOCK, STAGES
        )
        num_hidden = num_within - tl.sum((b_lanes < NEVER).to(tl.int32))
        rank = top_k - num_before
        new_low, last = find_two_of_lanes(b_lanes, rank - num_hidden, rank, ID_BITS)
        low = tl.maximum(low, new_low)
        high = tl.minimum(high, last + 1)
        num_rounds += 1
    return 1 + bisect_places(p_scaled, low, high, top_k, False, VOCAB, ID_BITS, BLOCK, STAGES)
