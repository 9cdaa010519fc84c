"""The commit of all layers as an op: accepted rows, from the stash into the pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from graphs.kernels.gdn.commit_kernel import gdn_commit_kernel
from graphs.kernels.gdn.decode import block_shape
from graphs.kernels.gdn.layout import check_pools, check_stash
from graphs.kernels.gdn.stash import VerifyStash
from graphs.kernels.launch import launch

MAX_GRID_X = 2**31 - 1


@dataclass(frozen=True)
class CommitConfig:
    """How many blocks of one head's state a program takes, and how many it reads ahead.

    Neither changes a bit: the blocks themselves and their warps are those of `block_shape`.
    """

    blocks_per_program: int
    blocks_ahead: int


COMMIT_CONFIG = CommitConfig(blocks_per_program=1, blocks_ahead=1)


def commit_grid(
    num_layers: int, num_requests: int, num_v_heads: int, parts_per_head: int
) -> tuple[int]:
    """Programs of one launch, all on x: the other axes end at 65,535."""
    num_programs = num_layers * num_requests * num_v_heads * parts_per_head
    assert num_programs <= MAX_GRID_X, num_programs
    return (num_programs,)


@torch.library.triton_op("deltaloom::gdn_commit", mutates_args={"conv_pool", "state_pool"})
def gdn_commit(
    stash_conv_in: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    stash_decay: Tensor,
    stash_beta: Tensor,
    positions: Tensor,
    num_committed: Tensor,
    state_slots: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
) -> None:
    """`graphs.kernels.gdn.verify_reference.gdn_commit` in one launch.

    Bitwise what `gdn_decode` leaves, called once per committed row. The pools may have any layer
    and slot stride. The kernel updates pools in place: never run it to tune it.
    """
    stash = VerifyStash(stash_conv_in, stash_k, stash_v, stash_decay, stash_beta)
    launch_commit(
        COMMIT_CONFIG,
        stash,
        positions,
        num_committed,
        state_slots,
        conv_pool,
        state_pool,
        num_k_heads,
    )


def launch_commit(
    config: CommitConfig,
    stash: VerifyStash,
    positions: Tensor,
    num_committed: Tensor,
    state_slots: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    num_k_heads: int,
) -> None:
    """`gdn_commit` with a launch shape of the caller's choice (see `gdn_commit`)."""
    check_pools(conv_pool, state_pool)
    check_stash(stash, conv_pool, state_pool, num_k_heads)
    num_layers, stash_requests, rows_per_request = stash.k.shape[:3]
    num_requests = state_slots.shape[0]
    assert num_layers == conv_pool.shape[0] == state_pool.shape[0], num_layers
    for tensor in (positions, num_committed, state_slots):
        assert tensor.shape == state_slots.shape and tensor.is_contiguous(), tensor.stride()
    assert stash_requests >= num_requests, stash_requests
    num_v_heads, head_v_dim, head_k_dim = state_pool.shape[2:]
    block_k, block_v, num_warps = block_shape(head_k_dim, head_v_dim)
    num_v_blocks = triton.next_power_of_2(triton.cdiv(head_v_dim, block_v))
    blocks_per_program = min(config.blocks_per_program, num_v_blocks)
    grid = commit_grid(num_layers, num_requests, num_v_heads, num_v_blocks // blocks_per_program)
    launch(gdn_commit_kernel)[grid](
        *stash,
        positions,
        num_committed,
        state_slots,
        conv_pool,
        state_pool,
        num_requests,
        stash_requests,
        conv_pool.stride(0),
        conv_pool.stride(1),
        state_pool.stride(0),
        state_pool.stride(1),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        NUM_TAPS=conv_pool.shape[2],
        ROWS=rows_per_request,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        NUM_V_BLOCKS=num_v_blocks,
        BLOCKS_PER_PROGRAM=blocks_per_program,
        BLOCKS_AHEAD=min(config.blocks_ahead, blocks_per_program),
        num_warps=num_warps,
    )
