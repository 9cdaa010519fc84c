"""The triangular system of each chunk: gates, decays, and the inverse of I + A."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.gdn.gate_kernel import log_gates


@triton.jit
def pair_decays(gap, is_seen):
    """e^(G_i - G_j) of the gaps G_i - G_j where is_seen [i, j], else 0.

    G only falls, so no exponent that counts is positive. G of -500 has an error of 3e-5 in fp32,
    as large as fp32 results may err in all: where results are fp32, the gap includes what
    rounding took from G.
    """
    return tl.exp(tl.where(is_seen, gap, -float("inf")))


@triton.jit
def invert_diagonal(scratch_ptr, CHUNK: tl.constexpr):
    """Replace the 16 x 16 diagonal blocks L of scratch by (I + L)^-1; L strictly lower.

    Forward substitution, one column per thread: a series in powers of L would lose all digits
    when keys are nearly parallel. Through memory, because there every thread can read any
    element of L for the price of one load.
    """
    columns = tl.arange(0, CHUNK)
    block_ptrs = scratch_ptr + columns // 16 * (16 * CHUNK + 16)
    column = columns % 16
    solved = ((column == 0).to(tl.float32),)
    for i in tl.static_range(1, 16):
        x = (column == i).to(tl.float32)
        for j in tl.static_range(i):
            x -= tl.load(block_ptrs + (i * CHUNK + j)) * solved[j]
        solved = solved + (x,)  # noqa: RUF005  (Triton knows no starred expression)
        # Store now and then, so that not all of L is loaded into registers ahead.
        if i % 4 == 3:
            tl.debug_barrier()
            for row in tl.static_range(i - 3, i + 1):
                tl.store(block_ptrs + row * CHUNK + column, solved[row])
    tl.debug_barrier()


@triton.jit
def merge_pairs(scratch_ptr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Turn inverted 16 x 16 diagonal blocks into inverted 32 x 32 ones."""
    blocks = tl.arange(0, CHUNK // 32)
    rows = tl.arange(0, 16)
    ptrs = scratch_ptr + blocks[:, None, None] * (32 * CHUNK + 32)
    ptrs += rows[None, :, None] * CHUNK + rows[None, None, :]
    upper = tl.load(ptrs)
    below = tl.load(ptrs + 16 * CHUNK)
    lower = tl.load(ptrs + (16 * CHUNK + 16))
    below = tl.dot(lower, below, input_precision=PRECISION)
    below = tl.dot(below, upper, input_precision=PRECISION)
    tl.debug_barrier()
    tl.store(ptrs + 16 * CHUNK, -below)
    tl.debug_barrier()


@triton.jit
def store_inverse(scratch_ptr, inverse_ptr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Merge the two inverted 32 x 32 blocks of scratch, and write the 64 x 64 inverse."""
    HALF: tl.constexpr = CHUNK // 2
    rows = tl.arange(0, HALF)
    offsets = rows[:, None] * CHUNK + rows[None, :]
    upper = tl.load(scratch_ptr + offsets)
    below = tl.load(scratch_ptr + HALF * CHUNK + offsets)
    lower = tl.load(scratch_ptr + HALF * (CHUNK + 1) + offsets)
    dtype = inverse_ptr.dtype.element_ty
    tl.store(inverse_ptr + offsets, upper.to(dtype))
    tl.store(inverse_ptr + HALF + offsets, tl.zeros([HALF, HALF], dtype))
    tl.store(inverse_ptr + HALF * (CHUNK + 1) + offsets, lower.to(dtype))
    below = tl.dot(lower, below, input_precision=PRECISION)
    below = tl.dot(below, upper, input_precision=PRECISION)
    tl.store(inverse_ptr + HALF * CHUNK + offsets, (-below).to(dtype))


@triton.jit
def gdn_prefill_solve_kernel(
    projected_ptr,
    row_starts_ptr,
    chunks_ptr,
    a_log_ptr,
    dt_bias_ptr,
    products_ptr,
    lengths_ptr,
    inverses_ptr,
    factors_ptr,
    scratch_ptr,
    projected_stride,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_FACTORS: tl.constexpr,
):
    """Program (chunk, value head), with a scratch of [CHUNK, CHUNK] fp32.

    With G the running sum of the log decay in the chunk, and k the unit keys, A is
    beta_i (k_i . k_j) e^(G_i - G_j) below the diagonal. Writes inverses (I + A)^-1
    [NC, HV, CHUNK, CHUNK] and factors [NC, HV, NUM_FACTORS, CHUNK]: G and what rounding took
    from it, beta, and with r the inverse length of a key beta r e^G, r e^(G_last - G), r.
    """
    tl.static_assert(CHUNK == 64)
    pair = tl.program_id(0).to(tl.int64)
    v_head = tl.program_id(0) % HV
    chunk = pair // HV
    request = tl.load(chunks_ptr + 2 * chunk)
    first_row = tl.load(chunks_ptr + 2 * chunk + 1)
    num_rows = (tl.load(row_starts_ptr + request + 1) - first_row).to(tl.int32)
    if num_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    tile = rows[:, None] * CHUNK + rows[None, :]
    k_tile = chunk * H + v_head // (HV // H)
    products = tl.load(products_ptr + k_tile * (CHUNK * CHUNK) + tile)
    length = tl.load(lengths_ptr + k_tile * CHUNK + rows)
    gate_ptr = projected_ptr + first_row * projected_stride + 2 * H * K + 2 * HV * V + v_head
    is_row = rows < num_rows
    a = tl.load(gate_ptr + HV + rows * projected_stride, mask=is_row, other=0.0)
    b = tl.load(gate_ptr + rows * projected_stride, mask=is_row, other=0.0)
    g, beta = log_gates(a, b, tl.load(a_log_ptr + v_head), tl.load(dt_bias_ptr + v_head))
    beta = tl.where(is_row, beta, 0.0)
    decay_f64 = tl.cumsum(tl.where(is_row, g, 0.0).to(tl.float64), axis=0)
    decay = decay_f64.to(tl.float32)
    decay_rest = (decay_f64 - decay.to(tl.float64)).to(tl.float32)
    rest_decay = tl.sum(tl.where(rows == CHUNK - 1, decay_f64, 0.0), axis=0) - decay_f64
    factor_ptrs = factors_ptr + pair * (NUM_FACTORS * CHUNK) + rows
    tl.store(factor_ptrs, decay)
    tl.store(factor_ptrs + CHUNK, decay_rest)
    tl.store(factor_ptrs + 2 * CHUNK, beta)
    tl.store(factor_ptrs + 3 * CHUNK, beta * length * tl.exp(decay))
    tl.store(factor_ptrs + 4 * CHUNK, length * tl.exp(rest_decay.to(tl.float32)))
    tl.store(factor_ptrs + 5 * CHUNK, length)
    is_past = rows[:, None] > rows[None, :]
    gap = decay[:, None] - decay[None, :]
    if inverses_ptr.dtype.element_ty == tl.float32:
        gap += decay_rest[:, None] - decay_rest[None, :]
    system = products * beta[:, None] * pair_decays(gap, is_past)
    scratch_ptr += pair * (CHUNK * CHUNK)
    tl.store(scratch_ptr + tile, system)
    tl.debug_barrier()
    invert_diagonal(scratch_ptr, CHUNK)
    merge_pairs(scratch_ptr, CHUNK, PRECISION)
    store_inverse(scratch_ptr, inverses_ptr + pair * (CHUNK * CHUNK), CHUNK, PRECISION)
