# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""The best token of each row, in splits over the whole GPU."""

import triton
import triton.language as tl


@triton.jit
def choose_first(b_value, b_id, VOCAB: tl.constexpr):
    """The largest value, and the lowest id of those that have it."""
    best = tl.max(b_value)
    return best, tl.min(tl.where(b_value == best, b_id, VOCAB))


@triton.jit
def argmax_splits_kernel(
    logits_ptr,
    best_ptr,
    best_id_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """The best of SPLIT tokens of a row; best (fp32) and best_id (int32) are [R, NUM_SPLITS].

    NaN counts as +inf: the row is bad either way.
    """
    i_row = tl.program_id(0) // NUM_SPLITS
    first = (tl.program_id(0) % NUM_SPLITS) * SPLIT
    p_logits = logits_ptr + i_row.to(tl.int64) * VOCAB
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_best_id = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, SPLIT, BLOCK):
        o_id = first + start + tl.arange(0, BLOCK)
        b_value = tl.load(p_logits + o_id, mask=o_id < VOCAB, other=float("-inf")).to(tl.float32)
        b_value = tl.where(b_value == b_value, b_value, float("inf"))
        b_best_id = tl.where(b_value > b_best, o_id, b_best_id)
        b_best = tl.maximum(b_best, b_value)
    best, best_id = choose_first(b_best, b_best_id, VOCAB)
    tl.store(best_ptr + tl.program_id(0), best)
    tl.store(best_id_ptr + tl.program_id(0), best_id)


@triton.jit
def argmax_rows_kernel(
    best_ptr,
    best_id_ptr,
    token_ids_ptr,
    is_bad_ptr,
    VOCAB: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """The best of a row's splits; a row whose best is not finite is bad, its token 0."""
    i_row = tl.program_id(0)
    o_split = tl.arange(0, SPLITS_PADDED)
    m_split = o_split < NUM_SPLITS
    o_row = i_row * NUM_SPLITS
    b_best = tl.load(best_ptr + o_row + o_split, mask=m_split, other=float("-inf"))
    b_best_id = tl.load(best_id_ptr + o_row + o_split, mask=m_split, other=VOCAB)
    best, best_id = choose_first(b_best, b_best_id, VOCAB)
    is_bad = (best == float("inf")) | (best == float("-inf"))
    tl.store(token_ids_ptr + i_row, tl.where(is_bad, 0, best_id).to(tl.int64))
    tl.store(is_bad_ptr + i_row, is_bad.to(tl.uint8))
