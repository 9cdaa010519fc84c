# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,attr-defined"
"""Adding up what the splits of a context leave, in split order, so that runs repeat bit by bit.

Each split leaves a normalised result and the logarithm of its weight. They are added up by a
kernel of its own, or by the programs that leave them: by the one that comes last, or by all of
them together, each a slice, after they have waited for one another.

Programs of a (request, key/value head) meet at a counter, which is zero or what an earlier launch
left: its low 31 bits are zero again once all have come, and its sign has changed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.attention.tile_kernel import LOWEST

# The log weight of a split that has seen no token. Finite: torch.compile writes constants out by
# name, and an infinity has none. Its power of two is zero beside LOWEST as well.
NOTHING = tl.constexpr(-3e38)
LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def count_splits(num_tiles, num_splits, min_tiles):
    """How many of num_splits a context uses, one at least; several have min_tiles or more each.

    The fewest with the same longest split: 16 tiles over 5 splits are 4 splits of 4 tiles.
    """
    num_used = tl.maximum(tl.minimum(num_splits, num_tiles // min_tiles), 1)
    longest = tl.maximum(tl.cdiv(num_tiles, num_used), 1)
    return tl.maximum(tl.cdiv(num_tiles, longest), 1)


@triton.jit
def combine_block(
    partial_ptr,
    log_weight_ptr,
    qkv_ptr,
    out_ptr,
    qkv_stride,
    i_head,
    i_block,
    num_splits,
    num_used,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of dims of one row's query head; i_head, int64, counts over rows and heads.

    .cg: other programs of the same launch may have written this, and L1 is not coherent. The
    acquiring atomic empties it as well, but costs nothing to not depend on.
    """
    o_d = i_block * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_used
    p_partial = partial_ptr + i_head * num_splits * D + (o_s[:, None] * D + o_d[None, :])
    m_sd = m_s[:, None] & m_d[None, :]
    b_partial = tl.load(p_partial, mask=m_sd, other=0.0, cache_modifier=".cg")
    p_gate = qkv_ptr + ((i_head // HQ) * qkv_stride + (2 * (i_head % HQ) + 1) * D) + o_d
    b_gate = tl.load(p_gate, mask=m_d, other=0.0).to(tl.float32)
    p_log_weight = log_weight_ptr + i_head * num_splits + o_s
    b_log_weight = tl.load(p_log_weight, mask=m_s, other=NOTHING, cache_modifier=".cg")
    b_weight = tl.exp2(b_log_weight - tl.maximum(tl.max(b_log_weight, axis=0), LOWEST))
    b_sum = tl.sum(b_weight, axis=0)
    # What a split that sees nothing has written, or left unwritten, may be NaN.
    b_partial = tl.where(b_weight[:, None] > 0.0, b_partial, 0.0)
    b_acc = tl.sum(b_partial * b_weight[:, None], axis=0)
    b_out = b_acc / (tl.where(b_sum > 0.0, b_sum, 1.0) * (1.0 + tl.exp(-b_gate)))
    tl.store(out_ptr + i_head * D + o_d, b_out.to(out_ptr.dtype.element_ty), mask=m_d)


@triton.jit
def meet(p_arrivals, i_split, num_used, WAITS: tl.constexpr):
    """Count a split in whose partials are stored; whether all num_used >= 2 have been.

    WAITS: return only then. Whoever returns true may read all that those have stored.
    """
    # Split 0 adds 2^31 - (num_used - 1), the others 1: together the sign, and nothing else.
    step = tl.where(i_split == 0, LOW_BITS - (num_used - 2), 1)
    # Every thread's stores come before the one thread's release, and its acquire before every
    # thread's loads.
    tl.debug_barrier()
    before = tl.atomic_add(p_arrivals, step, sem="acq_rel", scope="gpu")
    now = before + step
    if WAITS:
        while (now ^ before) >= 0:
            now = tl.atomic_add(p_arrivals, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    return (now & LOW_BITS) == 0


@triton.jit(do_not_specialize=["num_splits", "min_tiles"])
def combine_splits_kernel(
    partial_ptr,
    log_weight_ptr,
    context_lens_ptr,
    qkv_ptr,
    out_ptr,
    qkv_stride,
    num_splits,
    min_tiles,
    HQ: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOADS_ALL_SPLITS: tl.constexpr,
):
    """One program per (row, query head, block of dims)."""
    NUM_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    i_head = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)  # over rows and heads
    num_used = num_splits
    if not LOADS_ALL_SPLITS:
        context_len = tl.load(context_lens_ptr + i_head // (HQ * ROWS)).to(tl.int32)
        num_used = count_splits(tl.cdiv(context_len, BLOCK_N), num_splits, min_tiles)
        if num_used == 1:  # written out already
            return
    combine_block(
        partial_ptr, log_weight_ptr, qkv_ptr, out_ptr, qkv_stride,
        i_head, tl.program_id(0) % NUM_BLOCKS, num_splits, num_used, HQ, D, BLOCK_S, BLOCK_D,
    )  # fmt: skip
