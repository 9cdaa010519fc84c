"""The outputs of each chunk, from the state before it and its new values."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from graphs.kernels.gdn.chunk_solve_kernel import pair_decays


@triton.jit
def zero_padding_rows(
    out_ptr,
    first_row,
    num_rows,
    num_chunks,
    v_head,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Zero one head of some rows, spread over the chunks, that belong to no request."""
    v_dims = tl.arange(0, BLOCK_V)
    for row in range(first_row, num_rows, num_chunks):
        out_ptrs = out_ptr + row * (HV * V) + v_head * V + v_dims
        tl.store(out_ptrs, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=v_dims < V)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def gdn_prefill_output_kernel(
    projected_ptr,
    row_starts_ptr,
    chunks_ptr,
    norm_weight_ptr,
    queries_keys_ptr,
    values_ptr,
    factors_ptr,
    boundary_states_ptr,
    out_ptr,
    num_rows,
    num_requests,
    projected_stride,
    EPS: tl.constexpr,
    Q_SCALE: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROW_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_FACTORS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (chunk, value head, BLOCK_T rows):
    o = (q e^G) h^T + tril(q k^T e^(G_i - G_j)) D, gated and normed.

    queries_keys has rows of ROW_K, read BLOCK_K at a time. The outputs of padding rows are zero.
    Products of fp32 numbers are as exact as in fp32 arithmetic, which takes too many registers.
    BLOCK_T must be 32 for fp32: with 64 rows they become wgmma, and ptxas 12.8 was seen to take
    the shared-memory address of some of those from a register that holds the program's index.
    """
    NUM_BLOCKS: tl.constexpr = CHUNK // BLOCK_T
    first = tl.program_id(0) % NUM_BLOCKS * BLOCK_T
    v_head = tl.program_id(0) // NUM_BLOCKS % HV
    chunk = (tl.program_id(0) // (NUM_BLOCKS * HV)).to(tl.int64)
    if first == 0:
        padding_row = tl.load(row_starts_ptr + num_requests) + chunk
        num_chunks = tl.num_programs(0) // (NUM_BLOCKS * HV)
        zero_padding_rows(out_ptr, padding_row, num_rows, num_chunks, v_head, HV, V, BLOCK_V)
    request = tl.load(chunks_ptr + 2 * chunk)
    first_row = tl.load(chunks_ptr + 2 * chunk + 1)
    num_rows = (tl.load(row_starts_ptr + request + 1) - first_row).to(tl.int32)
    if num_rows <= first:
        return
    rows = first + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, CHUNK)
    v_dims = tl.arange(0, BLOCK_V)
    pair = chunk * HV + v_head
    q_ptr = queries_keys_ptr + (chunk * (2 * H) + v_head // (HV // H)) * (CHUNK * ROW_K)
    state_ptr = boundary_states_ptr + pair * (V * K)
    o = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    scores = tl.zeros([BLOCK_T, CHUNK], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    for first_dim in tl.range(0, ROW_K, BLOCK_K, num_stages=NUM_STAGES):
        dims = first_dim + tl.arange(0, BLOCK_K)
        q = tl.load(q_ptr + rows[:, None] * ROW_K + dims[None, :])
        k = tl.load(q_ptr + (H * CHUNK + columns)[:, None] * ROW_K + dims[None, :])
        is_tile = (v_dims < V)[:, None] & (dims < K)[None, :]
        state_ptrs = state_ptr + v_dims[:, None] * K + dims[None, :]
        state = tl.load(state_ptrs, mask=is_tile, other=0.0).to(q.dtype)
        o = tl.dot(q, tl.trans(state), acc=o, input_precision="tf32x3")
        scores = tl.dot(q, tl.trans(k), acc=scores, input_precision="tf32x3")
        square += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
    factors_ptr += pair * (NUM_FACTORS * CHUNK)
    decay = tl.load(factors_ptr + rows)
    k_length = tl.load(factors_ptr + 5 * CHUNK + columns)
    q_length = tl.rsqrt(square + 1e-6) * Q_SCALE
    is_seen = rows[:, None] >= columns[None, :]
    gap = decay[:, None] - tl.load(factors_ptr + columns)[None, :]
    if values_ptr.dtype.element_ty == tl.float32:
        tl.static_assert(BLOCK_T == 32, "ptxas miscompiles the fp32 products of 64 rows")
        rest_ptr = factors_ptr + CHUNK
        gap += tl.load(rest_ptr + rows)[:, None] - tl.load(rest_ptr + columns)[None, :]
    scores *= k_length[None, :] * pair_decays(gap, is_seen)
    value_ptr = values_ptr + pair * (BLOCK_V * CHUNK)
    values = tl.load(value_ptr + v_dims[:, None] * CHUNK + columns[None, :])
    o *= tl.exp(decay)[:, None]
    o = tl.dot(scores.to(values.dtype), tl.trans(values), acc=o, input_precision="tf32x3")
    o *= q_length[:, None]
    row_norm = tl.rsqrt(tl.sum(o * o, axis=1) / V + EPS)
    weight = tl.load(norm_weight_ptr + v_dims, mask=v_dims < V, other=0.0).to(tl.float32)
    is_out = (rows < num_rows)[:, None] & (v_dims < V)[None, :]
    z_ptr = projected_ptr + first_row * projected_stride + 2 * H * K + HV * V + v_head * V
    z_ptrs = z_ptr + rows[:, None] * projected_stride + v_dims[None, :]
    z = tl.load(z_ptrs, mask=is_out, other=0.0).to(tl.float32)
    y = o * row_norm[:, None] * weight[None, :] * z * tl.sigmoid(z)
    out_ptrs = out_ptr + first_row * (HV * V) + v_head * V
    out_ptrs += rows[:, None] * (HV * V) + v_dims[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=is_out)
