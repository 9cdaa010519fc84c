# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Drawing a token from a truncated distribution without sorting it.

Scores are at most 0, so a score's magnitude, the bits of its absolute value, grows as the score
falls. A token's place, magnitude << ID_BITS | id as int64, is unique, and places ascend in the
order that tokens rank. All truncations keep the tokens whose place is below some end: places are
compared with ends, and which end is right follows from counts and masses of the tokens before it.
Those are integers, so neither the blocks nor the order of additions changes a token.
"""

import triton
import triton.language as tl

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
PADDING_MAGNITUDE = tl.constexpr(0x7F800001)  # right behind that of -inf
MAGNITUDE_BITS = tl.constexpr(31)
MASS_SCALE = tl.constexpr(2.0**40)
# A draw that is rejected leaves its own place as the end. With Gumbel noise the mass that is too
# much then halves, or better; other noise may take one token away at a time.
MAX_DRAWS = tl.constexpr(12)
# Each round leaves about the square of the last one's share of the tokens undecided.
MAX_ROUNDS = tl.constexpr(4)
VECTOR = tl.constexpr(4)  # fp32 values of a 16-byte load


@triton.jit
def load_scores(p_scaled, o_id, VOCAB: tl.constexpr):
    """Scores and magnitudes; what is no number at most 0 counts as -inf."""
    b_scaled = tl.load(p_scaled + o_id, mask=o_id < VOCAB, other=0.0)
    b_scaled = tl.where(b_scaled <= 0.0, b_scaled, float("-inf"))
    b_magnitude = b_scaled.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    return b_scaled, tl.where(o_id < VOCAB, b_magnitude, PADDING_MAGNITUDE)


@triton.jit
def is_before(b_magnitude, o_id, end, ID_BITS: tl.constexpr):
    """Whether places lie before `end`, without building them."""
    magnitude = (end >> ID_BITS).to(tl.int32)
    id_end = (end & ((1 << ID_BITS) - 1)).to(tl.int32)
    return b_magnitude < magnitude + (o_id < id_end).to(tl.int32)


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
    p_noise,
    is_greedy,
    first,
    last,
    end_mass,
    end_draw,
    VOCAB: tl.constexpr,
    ID_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Token ids first .. last - 1: the mass before end_mass, and the draw before end_draw.

    The draw is the largest noisy score and its place, NEVER where no token is before end_draw.
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    # Groups of VECTOR share the mask of the noise, so that its loads stay 16 bytes wide.
    o_block = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    b_mass = tl.zeros([BLOCK // VECTOR, VECTOR], tl.int64)
    b_best = tl.full([BLOCK // VECTOR, VECTOR], float("-inf"), tl.float32)
    b_drawn = tl.full([BLOCK // VECTOR, VECTOR], NEVER, tl.int64)
    for start in range(first, last, BLOCK):
        o_id = start + o_block
        b_scaled, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
        m_mass = is_before(b_magnitude, o_id, end_mass, ID_BITS)
        b_mass += tl.where(m_mass, mass_of(b_scaled), 0)
        m_draw = is_before(b_magnitude, o_id, end_draw, ID_BITS)
        m_noise = tl.max(m_draw.to(tl.int32), 1, keep_dims=True) > is_greedy
        b_noise = tl.load(p_noise + o_id, mask=m_noise & (o_id < VOCAB), other=0.0)
        b_noisy = b_scaled + b_noise
        b_noisy = tl.where(b_noisy == b_noisy, b_noisy, float("-inf"))
        m_better = m_draw & ((b_noisy > b_best) | (b_drawn == NEVER))
        b_best = tl.where(m_better, b_noisy, b_best)
        b_place = (b_magnitude.to(tl.int64) << ID_BITS) | o_id
        b_drawn = tl.where(m_better, b_place, b_drawn)
    best, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    return tl.sum(b_mass), best, drawn


@triton.jit
def find_lane_minima(
    p_scaled, low, high, VOCAB: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the ids equal modulo BLOCK, the first place in [low, high), NEVER where there is none.

    Also how many places are before low, and how many in [low, high).
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    o_block = tl.arange(0, BLOCK)
    b_lanes = tl.full([BLOCK], NEVER, tl.int64)
    b_before = tl.zeros([BLOCK], tl.int32)
    b_within = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
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
    if BY_MASS:
        b_weight = tl.where(m_before, mass_of(b_scaled), 0)
    else:
        b_weight = m_before.to(tl.int32)
    return b_weight


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
        for start in range(0, VOCAB, BLOCK):
            o_id = start + o_block
            b_scaled, b_magnitude = load_scores(p_scaled, o_id, VOCAB)
            b_1 += weigh(b_scaled, is_before(b_magnitude, o_id, low + step, ID_BITS), BY_MASS)
            b_2 += weigh(b_scaled, is_before(b_magnitude, o_id, low + 2 * step, ID_BITS), BY_MASS)
            b_3 += weigh(b_scaled, is_before(b_magnitude, o_id, low + 3 * step, ID_BITS), BY_MASS)
        # The number of the three that hold less than the limit: they ascend.
        num_low = (tl.sum(b_1) < limit).to(tl.int64) + (tl.sum(b_2) < limit).to(tl.int64)
        num_low += (tl.sum(b_3) < limit).to(tl.int64)
        high = tl.where(num_low < 3, tl.minimum(high, low + (num_low + 1) * step), high)
        low += num_low * step
    return low


@triton.jit
def find_top_k_end(
    p_scaled, top_k, VOCAB: tl.constexpr, ID_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The end behind the first top_k places, 1 <= top_k < VOCAB.

    The best of every lane bound the place from both sides: with `hidden` tokens that are not
    their lane's best, the lanes' r-th best has a rank of r to r + hidden.
    """
    NEVER: tl.constexpr = PADDING_MAGNITUDE << ID_BITS
    low = tl.full([], 0, tl.int64)
    high = tl.full([], NEVER, tl.int64)
    num_rounds = 0
    while (top_k <= BLOCK // 4) & (num_rounds < MAX_ROUNDS) & (high - low > 1):
        b_lanes, num_before, num_within = find_lane_minima(
            p_scaled, low, high, VOCAB, ID_BITS, BLOCK
        )
        num_hidden = num_within - tl.sum((b_lanes < NEVER).to(tl.int32))
        rank = top_k - num_before
        new_low, last = find_two_of_lanes(b_lanes, rank - num_hidden, rank, ID_BITS)
        low = tl.maximum(low, new_low)
        high = tl.minimum(high, last + 1)
        num_rounds += 1
    return 1 + bisect_places(p_scaled, low, high, top_k, False, VOCAB, ID_BITS, BLOCK)


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
            PADDING_MAGNITUDE << ID_BITS,
            min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS),
            VOCAB,
            ID_BITS,
            BLOCK,
        )
        tl.store(mass_ptr + tl.program_id(0), mass)
        tl.store(best_ptr + tl.program_id(0), best)
        tl.store(drawn_ptr + tl.program_id(0), drawn)


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
        end = find_top_k_end(p_scaled, top_k.to(tl.int32), VOCAB, ID_BITS, BLOCK)
        end_draw = tl.minimum(end, min_p_end(tl.load(log_min_p_ptr + i_row), ID_BITS))
        total, _, drawn = scan(
            p_scaled, p_noise, is_greedy, 0, VOCAB, end, end_draw, VOCAB, ID_BITS, BLOCK
        )
    else:
        o_split = tl.arange(0, SPLITS_PADDED)
        m_split = o_split < NUM_SPLITS
        o_split += i_row * NUM_SPLITS
        total = tl.sum(tl.load(mass_ptr + o_split, mask=m_split, other=0))
        b_best = tl.load(best_ptr + o_split, mask=m_split, other=float("-inf"))
        b_drawn = tl.load(drawn_ptr + o_split, mask=m_split, other=NEVER)
        _, drawn = choose_best(b_best, b_drawn, VOCAB, ID_BITS)
    if top_p < 1.0:
        wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        wanted = tl.maximum(wanted, 1)
        # Looking at what is before a draw also makes the next one, should this be rejected.
        mass, _, before = scan(
            p_scaled, p_noise, is_greedy, 0, VOCAB, drawn, drawn, VOCAB, ID_BITS, BLOCK
        )
        num_draws = 1
        while (mass >= wanted) & (num_draws < MAX_DRAWS):
            drawn = before
            mass, _, before = scan(
                p_scaled, p_noise, is_greedy, 0, VOCAB, drawn, drawn, VOCAB, ID_BITS, BLOCK
            )
            num_draws += 1
        if mass >= wanted:
            low = tl.full([], 0, tl.int64)
            end = 1 + bisect_places(p_scaled, low, drawn, wanted, True, VOCAB, ID_BITS, BLOCK)
            _, _, drawn = scan(
                p_scaled, p_noise, is_greedy, 0, VOCAB, end, end, VOCAB, ID_BITS, BLOCK
            )
    # Only a row without a best token of score 0 may have no draw.
    i_token = tl.where(drawn < NEVER, drawn & ((1 << ID_BITS) - 1), 0)
    tl.store(token_ids_ptr + i_row, i_token)
