# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Penalties, logit bias and the min_tokens mask, then the temperature.

Each operation rounds as the reference's does: no product is fused with a sum, and quotients are
those of IEEE.
"""

import triton
import triton.language as tl

from graphs.kernels.sample.rows import ROW_POINTERS


@triton.jit
def penalise(b_logit, b_count, b_in_prompt, presence, frequency, repetition):
    """One block's logits, with the penalties of its row."""
    m_output = b_count > 0
    m_seen = m_output | (b_in_prompt != 0)
    b_divided = tl.div_rn(b_logit, tl.zeros_like(b_logit) + repetition)
    b_repeated = tl.where(b_logit > 0, b_divided, b_logit * repetition)
    b_logit = tl.where(m_seen, b_repeated, b_logit)
    # Exact in float64, then rounded once: as float32, it would be fused with the difference.
    b_frequency = (frequency.to(tl.float64) * b_count.to(tl.float64)).to(tl.float32)
    b_logit -= b_frequency
    return b_logit - tl.where(m_output, presence, 0.0)


@triton.jit
def count_drafts(b_count, o_id, row_tokens_ptr, i_row, ROWS_PER_REQUEST: tl.constexpr):
    """The counts, and the drafts of a request's rows up to this one; its first row has none."""
    num_drafts = i_row % ROWS_PER_REQUEST
    for i_back in tl.static_range(0, ROWS_PER_REQUEST - 1):
        m_draft = i_back < num_drafts
        token_id = tl.load(row_tokens_ptr + i_row - i_back, mask=m_draft, other=-1)
        b_count += (o_id == token_id).to(tl.int32)
    return b_count


@triton.jit
def peak_of(b_logit):
    """For the maximum: NaN counts as +inf, for the row is bad either way."""
    return tl.where(b_logit == b_logit, b_logit, float("inf"))


@triton.jit
def add_at(p_row, b_id, b_value, first, last):
    """Add values at those ids that lie in first .. last - 1, which this program has stored.

    Returns how many. An id may come twice if both its values are -inf.
    """
    m_here = (b_value != 0.0) & (b_id >= first) & (b_id < last)
    num_here = tl.sum(m_here.to(tl.int32))
    if num_here > 0:
        # Other threads stored what this one adds to.
        tl.debug_barrier()
        b_old = tl.load(p_row + b_id, mask=m_here, other=0.0)
        tl.store(p_row + b_id, b_old + b_value, mask=m_here)
    return num_here


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def adjust_splits_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    row_tokens_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    min_tokens_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    masked_ids_ptr,
    output_counts_ptr,
    in_prompt_ptr,
    adjusted_ptr,
    peaks_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    BIASES_PADDED: tl.constexpr,
    NUM_MASKED: tl.constexpr,
    MASKED_PADDED: tl.constexpr,
    ROWS_PER_REQUEST: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MIN_TOKENS: tl.constexpr,
):
    """SPLIT tokens of a row, adjusted (fp32 [R, V]), and their peak (fp32 [R, NUM_SPLITS])."""
    i_row = tl.program_id(0) // NUM_SPLITS
    first = (tl.program_id(0) % NUM_SPLITS) * SPLIT
    last = tl.minimum(first + SPLIT, VOCAB)
    slot = tl.load(slots_ptr + i_row)
    p_logits = logits_ptr + i_row.to(tl.int64) * VOCAB
    p_adjusted = adjusted_ptr + i_row.to(tl.int64) * VOCAB
    presence = tl.load(presence_ptr + i_row)
    frequency = tl.load(frequency_ptr + i_row)
    repetition = tl.load(repetition_ptr + i_row)
    is_penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    is_penalised = is_penalised & HAS_PENALTIES
    is_early = tl.load(positions_ptr + i_row) < tl.load(min_tokens_ptr + i_row)
    b_peak = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(first, last, BLOCK):
        o_id = start + tl.arange(0, BLOCK)
        m_id = o_id < VOCAB
        b_logit = tl.load(p_logits + o_id, mask=m_id, other=float("-inf")).to(tl.float32)
        if is_penalised:
            b_count = tl.load(output_counts_ptr + slot * VOCAB + o_id, mask=m_id, other=0)
            b_count = count_drafts(b_count, o_id, row_tokens_ptr, i_row, ROWS_PER_REQUEST)
            b_in_prompt = tl.load(in_prompt_ptr + slot * VOCAB + o_id, mask=m_id, other=0)
            b_logit = penalise(b_logit, b_count, b_in_prompt, presence, frequency, repetition)
        tl.store(p_adjusted + o_id, b_logit, mask=m_id)
        b_peak = tl.maximum(b_peak, peak_of(b_logit))
    num_added = tl.full([], 0, tl.int32)
    if HAS_BIAS:
        o_bias = slot * NUM_BIASES + tl.arange(0, BIASES_PADDED)
        m_bias = tl.arange(0, BIASES_PADDED) < NUM_BIASES
        b_bias = tl.load(bias_values_ptr + o_bias, mask=m_bias, other=0.0)
        b_biased = tl.load(bias_ids_ptr + o_bias, mask=m_bias & (b_bias != 0.0), other=-1)
        num_added += add_at(p_adjusted, b_biased, b_bias, first, last)
    if is_early & HAS_MIN_TOKENS:
        o_masked = slot * NUM_MASKED + tl.arange(0, MASKED_PADDED)
        m_masked = tl.arange(0, MASKED_PADDED) < NUM_MASKED
        b_masked = tl.load(masked_ids_ptr + o_masked, mask=m_masked, other=-1)
        b_offset = tl.full([MASKED_PADDED], float("-inf"), tl.float32)
        num_added += add_at(p_adjusted, b_masked, b_offset, first, last)
    if num_added > 0:
        tl.debug_barrier()
        b_peak = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(first, last, BLOCK):
            o_id = start + tl.arange(0, BLOCK)
            b_logit = tl.load(p_adjusted + o_id, mask=o_id < VOCAB, other=float("-inf"))
            b_peak = tl.maximum(b_peak, peak_of(b_logit))
    tl.store(peaks_ptr + tl.program_id(0), tl.max(b_peak))


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def scale_splits_kernel(
    adjusted_ptr,
    peaks_ptr,
    temperature_ptr,
    is_bad_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """(adjusted - peak) / temperature, in place; a row whose peak is not finite is bad."""
    i_row = tl.program_id(0) // NUM_SPLITS
    i_split = tl.program_id(0) % NUM_SPLITS
    o_split = tl.arange(0, SPLITS_PADDED)
    m_split = o_split < NUM_SPLITS
    b_peak = tl.load(peaks_ptr + i_row * NUM_SPLITS + o_split, mask=m_split, other=float("-inf"))
    peak = tl.max(b_peak)
    temperature = tl.load(temperature_ptr + i_row)
    p_adjusted = adjusted_ptr + i_row.to(tl.int64) * VOCAB
    first = i_split * SPLIT
    for start in tl.range(first, tl.minimum(first + SPLIT, VOCAB), BLOCK):
        o_id = start + tl.arange(0, BLOCK)
        m_id = o_id < VOCAB
        b_below = tl.load(p_adjusted + o_id, mask=m_id, other=0.0) - peak
        b_scaled = tl.div_rn(b_below, tl.zeros_like(b_below) + temperature)
        tl.store(p_adjusted + o_id, b_scaled, mask=m_id)
    if i_split == 0:
        is_bad = (peak == float("inf")) | (peak == float("-inf"))
        tl.store(is_bad_ptr + i_row, is_bad.to(tl.uint8))
