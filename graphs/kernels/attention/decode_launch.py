"""Launches of decode attention. Shapes and letters as in ops.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphs.kernels.attention.configs import (
    COMBINED_DIMS,
    DecodeConfig,
    combined_blocks,
    least_tiles,
    num_decode_splits,
    num_pooled_programs,
    pad_to_power_of_two,
)
from graphs.kernels.attention.decode_kernel import combine_splits_kernel, paged_decode_kernel
from graphs.kernels.attention.pooled_kernel import pooled_decode_kernel
from graphs.kernels.launch import launch

MAX_PACKED_ROWS = 128  # query heads of one key/value head times rows of one request


def launch_decode(
    q: Tensor,
    qkv: Tensor,
    pools: tuple[Tensor, Tensor],
    page_table: Tensor,
    context_lens: Tensor,
    rows_per_request: int,
    out: Tensor,
    config: DecodeConfig,
) -> None:
    """Fill out [T, HQ * D]. See `ops.paged_decode_attention`."""
    num_rows, num_q_heads, head_dim = q.shape
    num_requests, num_table_pages = page_table.shape
    _, page_size, num_kv_heads, _ = pools[0].shape
    group_size = num_q_heads // num_kv_heads
    check_strides(q, qkv, pools)
    assert page_table.stride(1) == 1, "page table rows have gaps"
    assert num_rows == num_requests * rows_per_request, "not rows_per_request rows a request"
    assert group_size * rows_per_request <= MAX_PACKED_ROWS, "too many rows a request"
    num_pairs = num_requests * num_kv_heads
    num_splits = num_decode_splits(config, num_pairs, num_table_pages * page_size)
    is_split = bool(num_splits > 1)
    partials = empty_partials(q, num_splits if is_split else 0)
    num_pooled = num_pooled_programs(config, num_pairs, num_splits)
    if num_pooled > 0:
        launch_pooled(
            q, qkv, pools, page_table, context_lens, rows_per_request, partials, out, config,
            num_splits, num_pooled,
        )  # fmt: skip
    else:
        launch_all_splits(
            q, qkv, pools, page_table, context_lens, rows_per_request, partials, out, config,
            num_splits,
        )  # fmt: skip
    if is_split:
        launch_combine(
            partials, context_lens, qkv, out, (num_q_heads, num_kv_heads, head_dim),
            rows_per_request, config, num_splits, num_pooled,
        )  # fmt: skip


def launch_all_splits(
    q: Tensor,
    qkv: Tensor,
    pools: tuple[Tensor, Tensor],
    page_table: Tensor,
    context_lens: Tensor,
    rows_per_request: int,
    partials: tuple[Tensor, Tensor],
    out: Tensor,
    config: DecodeConfig,
    num_splits: int,
) -> None:
    """A program for each of num_splits splits, used or not."""
    _, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = pools[0].shape
    group_size = num_q_heads // num_kv_heads
    num_pairs = page_table.shape[0] * num_kv_heads
    launch(paged_decode_kernel)[(num_pairs * num_splits,)](
        q,
        qkv,
        *pools,
        page_table,
        context_lens,
        *partials,
        out,
        qkv.stride(0),
        page_table.shape[1],
        page_table.stride(0),
        num_splits,
        least_tiles(config, num_pairs),
        SCALE=head_dim**-0.5 * math.log2(math.e),
        H=num_kv_heads,
        G=group_size,
        ROWS=rows_per_request,
        D=head_dim,
        D_PAD=pad_to_power_of_two(head_dim),
        M_PAD=pad_to_power_of_two(group_size * rows_per_request),
        PAGE_SIZE=page_size,
        BLOCK_N=config.block_n,
        IS_STRIDED=config.is_strided,
        LOADS_ALL_SPLITS=bool(num_splits > 1) and config.loads_all_splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def launch_pooled(
    q: Tensor,
    qkv: Tensor,
    pools: tuple[Tensor, Tensor],
    page_table: Tensor,
    context_lens: Tensor,
    rows_per_request: int,
    partials: tuple[Tensor, Tensor],
    out: Tensor,
    config: DecodeConfig,
    num_splits: int,
    num_pooled: int,
) -> None:
    """A pool of about num_pooled programs for those of num_splits splits that are in use."""
    _, num_q_heads, head_dim = q.shape
    num_requests, num_table_pages = page_table.shape
    _, page_size, num_kv_heads, _ = pools[0].shape
    group_size = num_q_heads // num_kv_heads
    num_pairs = num_requests * num_kv_heads
    num_teams = max(num_pooled // num_kv_heads, 1)
    launch(pooled_decode_kernel)[(num_teams * num_kv_heads,)](
        q,
        qkv,
        *pools,
        page_table,
        context_lens,
        *partials,
        out,
        qkv.stride(0),
        num_requests,
        num_table_pages,
        page_table.stride(0),
        num_splits,
        least_tiles(config, num_pairs),
        SCALE=head_dim**-0.5 * math.log2(math.e),
        H=num_kv_heads,
        G=group_size,
        ROWS=rows_per_request,
        D=head_dim,
        D_PAD=pad_to_power_of_two(head_dim),
        M_PAD=pad_to_power_of_two(group_size * rows_per_request),
        PAGE_SIZE=page_size,
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        IS_STRIDED=config.is_strided,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def launch_combine(
    partials: tuple[Tensor, Tensor],
    context_lens: Tensor,
    qkv: Tensor,
    out: Tensor,
    sizes: tuple[int, int, int],
    rows_per_request: int,
    config: DecodeConfig,
    num_splits: int,
    num_pooled: int,
) -> None:
    """Fill out from the splits' partials; sizes: query heads, key/value heads, head dim."""
    num_q_heads, num_kv_heads, head_dim = sizes
    num_heads = out.shape[0] * num_q_heads  # of all rows
    num_blocks = combined_blocks(num_pooled, head_dim)
    num_pieces = -(-head_dim // (num_blocks * COMBINED_DIMS))
    launch(combine_splits_kernel)[(num_heads * num_pieces,)](
        *partials,
        context_lens,
        qkv,
        out,
        qkv.stride(0),
        num_splits,
        least_tiles(config, context_lens.shape[0] * num_kv_heads),
        HQ=num_q_heads,
        ROWS=rows_per_request,
        D=head_dim,
        BLOCK_N=config.block_n,
        BLOCK_S=config.block_s,
        BLOCK_D=COMBINED_DIMS,
        NUM_BLOCKS=num_blocks,
        LOADS_ALL_SPLITS=config.loads_all_splits,
        num_warps=1,
    )


def empty_partials(q: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Room for each split's result [T, HQ, splits, D] and log weight [T, HQ, splits], fp32.

    Flat: from a symbolic number of splits Inductor would derive strides that it cannot prove to
    be those of the graph, and copy (torch 2.11, which then fails to order the copy).
    """
    num_rows, num_q_heads, head_dim = q.shape
    size = num_rows * num_q_heads * num_splits
    return (
        torch.empty(size * head_dim, dtype=torch.float32, device=q.device),
        torch.empty(size, dtype=torch.float32, device=q.device),
    )


def check_strides(q: Tensor, qkv: Tensor, pools: tuple[Tensor, Tensor]) -> None:
    """The kernels address memory as if these hold."""
    assert q.is_contiguous(), "q is not contiguous"
    assert qkv.stride(1) == 1, "qkv rows have gaps"
    assert pools[0].is_contiguous(), "k_pool is not contiguous"
    assert pools[1].is_contiguous(), "v_pool is not contiguous"
