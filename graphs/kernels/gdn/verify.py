"""The verify step as an op that torch.compile sees through."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from graphs.kernels.gdn.decode import block_shape
from graphs.kernels.gdn.layout import check_layout, check_stash
from graphs.kernels.gdn.stash import VerifyStash
from graphs.kernels.gdn.verify_kernel import gdn_verify_kernel
from graphs.kernels.launch import launch

STASH_ARGS = ("stash_conv_in", "stash_k", "stash_v", "stash_decay", "stash_beta")


@torch.library.triton_op("deltaloom::gdn_verify", mutates_args=STASH_ARGS)
def gdn_verify(
    projected: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    stash_conv_in: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    stash_decay: Tensor,
    stash_beta: Tensor,
    num_k_heads: int,
    eps: float,
    rows_per_request: int,
) -> Tensor:
    """`graphs.kernels.gdn.verify_reference.gdn_verify` in one launch.

    Bitwise what `gdn_decode` gives, called once per row with the same projected rows. projected
    may have any row stride, the pools any slot stride. Requests whose slot is the padding slot 0
    give zeros and leave the stash as it is.
    """
    check_layout(projected, conv_weight, conv_pool, state_pool)
    stash = VerifyStash(stash_conv_in, stash_k, stash_v, stash_decay, stash_beta)
    check_stash(stash, conv_pool, state_pool, num_k_heads)
    num_requests, stash_rows = state_slots.shape[0], stash_k.shape[1]
    assert projected.shape[0] == num_requests * rows_per_request, projected.shape
    assert positions.is_contiguous() and state_slots.is_contiguous(), positions.stride()
    assert stash_k.shape[0] >= num_requests and stash_rows >= rows_per_request, stash_k.shape
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[1:]
    out = projected.new_empty(projected.shape[0], num_v_heads * head_v_dim)
    block_k, block_v, num_warps = block_shape(head_k_dim, head_v_dim)
    launch(gdn_verify_kernel)[(num_requests * num_v_heads,)](
        projected,
        positions,
        state_slots,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        conv_pool,
        state_pool,
        *stash,
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
        ROWS=rows_per_request,
        STASH_ROWS=stash_rows,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        NUM_V_BLOCKS=triton.next_power_of_2(triton.cdiv(head_v_dim, block_v)),
        num_warps=num_warps,
    )
    return out
