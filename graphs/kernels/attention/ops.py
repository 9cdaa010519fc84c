"""Attention over a paged KV cache as Triton operators.

Shapes: T rows of R requests, HQ query heads, H key/value heads, D head dim (a multiple of 16 up
to 256; G = HQ / H up to 16). k_pool and v_pool are contiguous [pages, page_size, H, D], fastest
where page_size is a multiple of 64; page_table [R, P] names each request's pages in order; page 0
is padding and never written. qkv [T, 2 * HQ * D + 2 * H * D] has the columns [per query head: q,
gate | k | v]; its rows and those of the page table may be strided, q is contiguous. Index tensors
are int64. The `launch_` functions take the configuration and the output, for sweeps and tests.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphs.kernels.attention.configs import (
    PrefillConfig,
    PrepareConfig,
    decode_config,
    heads_per_program,
    pad_to_power_of_two,
    prefill_config,
)
from graphs.kernels.attention.decode_launch import check_strides, launch_decode
from graphs.kernels.attention.prefill_kernel import paged_prefill_kernel
from graphs.kernels.attention.prepare_kernel import prepare_qkv_kernel
from graphs.kernels.launch import launch

CHUNK = 64  # most rows of one chunk of the `chunks` table


@torch.library.triton_op("deltaloom::prepare_qkv", mutates_args={"k_pool", "v_pool"})
def prepare_qkv(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    num_q_heads: int,
    eps: float,
) -> Tensor:
    """Norm and rotate the queries and keys of qkv, store keys and values; returns q [T, HQ, D].

    Zero-centred RMSNorm per head with q_norm and k_norm [D], then rotary embedding of the first
    2 * len(inv_freq) dims, half-split, in fp32; inv_freq is fp32. k and v go to kv_slots [T]
    (page * page_size + offset) of the pools, in place; rows whose slot is in page 0 store nothing.
    """
    shape = (qkv.shape[0], num_q_heads, k_pool.shape[3])
    q = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    launch_prepare(
        qkv, (q_norm, k_norm, inv_freq), positions, kv_slots, (k_pool, v_pool), eps, q,
        PrepareConfig(),
    )  # fmt: skip
    return q


def launch_prepare(
    qkv: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    kv_slots: Tensor,
    pools: tuple[Tensor, Tensor],
    eps: float,
    q: Tensor,
    config: PrepareConfig,
) -> None:
    """Fill q [T, HQ, D] and the pools. See `prepare_qkv`; weights: two norms and inv_freq."""
    check_strides(q, qkv, pools)
    num_rows, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = pools[0].shape
    half = weights[2].shape[0]
    num_blocks = (num_rows + config.block_t - 1) // config.block_t
    launch(prepare_qkv_kernel)[(num_blocks * (num_q_heads + num_kv_heads),)](
        qkv,
        *weights,
        positions,
        kv_slots,
        *pools,
        q,
        num_rows,
        qkv.stride(0),
        EPS=float(eps),
        HQ=num_q_heads,
        H=num_kv_heads,
        D=head_dim,
        D_PAD=pad_to_power_of_two(head_dim),
        HALF=half,
        HALF_PAD=pad_to_power_of_two(half, 1),
        PAGE_SIZE=page_size,
        BLOCK_T=config.block_t,
        num_warps=config.num_warps,
    )


@torch.library.triton_op("deltaloom::paged_decode_attention", mutates_args={})
def paged_decode_attention(
    q: Tensor,
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    rows_per_request: int,
) -> Tensor:
    """Attention times sigmoid(gate) of rows_per_request rows a request; returns [T, HQ * D].

    q [T, HQ, D] is normed and rotated, the rows' own keys and values are in the pools. Row i of
    request r sees its first context_lens[r] - rows_per_request + i + 1 tokens.
    """
    num_rows, num_q_heads, head_dim = q.shape
    out = torch.empty(num_rows, num_q_heads * head_dim, dtype=q.dtype, device=q.device)
    num_kv_heads = k_pool.shape[2]
    packed_rows = num_q_heads // num_kv_heads * rows_per_request
    num_pairs = context_lens.shape[0] * num_kv_heads
    launch_decode(
        q, qkv, (k_pool, v_pool), page_table, context_lens, rows_per_request, out,
        decode_config(q.dtype, head_dim, packed_rows, num_pairs),
    )  # fmt: skip
    return out


@torch.library.triton_op("deltaloom::paged_prefill_attention", mutates_args={})
def paged_prefill_attention(
    q: Tensor,
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    row_starts: Tensor,
    chunks: Tensor,
) -> Tensor:
    """Attention times sigmoid(gate) of any number of rows a request, causal; [T, HQ * D].

    q [T, HQ, D] is normed and rotated, the rows' own keys and values are in the pools. Rows
    row_starts[r] to row_starts[r + 1] are the last of request r's context_lens[r] tokens. chunks
    [NC, 2], NC >= 1: (request, first row) of up to 64 rows; all rows are in one. Rows past
    row_starts[-1] are padding: zero.
    """
    num_rows, num_q_heads, head_dim = q.shape
    out = torch.empty(num_rows, num_q_heads * head_dim, dtype=q.dtype, device=q.device)
    launch_prefill(
        q, qkv, (k_pool, v_pool), page_table, context_lens, (row_starts, chunks), out,
        prefill_config(q.dtype, head_dim),
    )  # fmt: skip
    return out


def launch_prefill(
    q: Tensor,
    qkv: Tensor,
    pools: tuple[Tensor, Tensor],
    page_table: Tensor,
    context_lens: Tensor,
    rows: tuple[Tensor, Tensor],
    out: Tensor,
    config: PrefillConfig,
) -> None:
    """Fill out [T, HQ * D]. See `paged_prefill_attention`; rows are row_starts and chunks."""
    num_rows, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = pools[0].shape
    check_strides(q, qkv, pools)
    assert page_table.stride(1) == 1, "page table rows have gaps"
    group_size = num_q_heads // num_kv_heads
    heads = heads_per_program(config, group_size)
    num_chunks = rows[1].shape[0]
    num_pieces = num_chunks * (CHUNK // config.block_rows)
    launch(paged_prefill_kernel)[(num_pieces * (num_q_heads // heads),)](
        q,
        qkv,
        *pools,
        page_table,
        context_lens,
        *rows,
        out,
        num_rows,
        page_table.shape[0],
        num_chunks,
        page_table.shape[1],
        qkv.stride(0),
        page_table.stride(0),
        SCALE=head_dim**-0.5 * math.log2(math.e),
        H=num_kv_heads,
        G=group_size,
        HEADS=heads,
        D=head_dim,
        D_PAD=pad_to_power_of_two(head_dim),
        PAGE_SIZE=page_size,
        CHUNK=CHUNK,
        BLOCK_ROWS=config.block_rows,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
