"""The decode step as an op that torch.compile sees through."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.gdn.decode_kernel import gdn_decode_kernel
from graphs.kernels.gdn.layout import check_layout
from graphs.kernels.launch import launch

# Functions of the head dims alone: the order of arithmetic follows from them (`advance_state`).
MAX_BLOCK_V = 32
NUM_WARPS = 4
MIN_TILE_OF_WARPS = 2048


def block_shape(head_k_dim: int, head_v_dim: int) -> tuple[int, int, int]:
    """Padded K, the rows of V of one tile, and warps.

    Warps that a small tile cannot occupy would all write its sums to the same place.
    """
    block_k = triton.next_power_of_2(head_k_dim)
    block_v = min(triton.next_power_of_2(head_v_dim), MAX_BLOCK_V)
    return block_k, block_v, NUM_WARPS if block_k * block_v >= MIN_TILE_OF_WARPS else 1


@torch.library.triton_op("deltaloom::gdn_decode", mutates_args={"conv_pool", "state_pool"})
def gdn_decode(
    projected: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
    eps: float,
) -> Tensor:
    """`graphs.kernels.gdn.reference.gdn_decode` in one launch.

    projected may have any row stride, the pools any slot stride. Rows whose slot is the padding
    slot 0 write no pool and give zeros. The kernel updates pools in place: never run it to tune it.
    """
    check_layout(projected, conv_weight, conv_pool, state_pool)
    num_rows = projected.shape[0]
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    out = projected.new_empty(num_rows, num_v_heads * head_v_dim)
    block_k, block_v, num_warps = block_shape(head_k_dim, head_v_dim)
    launch(gdn_decode_kernel)[(num_rows * num_v_heads,)](
        projected,
        positions,
        state_slots,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv_pool,
        state_pool,
        out,
        projected.stride(0),
        conv_pool.stride(0),
        state_pool.stride(0),
        EPS=eps,
        Q_SCALE=head_k_dim**-0.5,
        H=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        NUM_TAPS=conv_weight.shape[1],
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        NUM_V_BLOCKS=triton.next_power_of_2(triton.cdiv(head_v_dim, block_v)),
        num_warps=num_warps,
    )
    return out
