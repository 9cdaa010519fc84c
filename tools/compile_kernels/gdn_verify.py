"""The GDN verify and commit launches that serving makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphs.kernels.gdn.commit import gdn_commit
from graphs.kernels.gdn.stash import VerifyStash, allocate_stash
from graphs.kernels.gdn.verify import gdn_verify

NUM_LAYERS = 2
NUM_SLOTS = 3
NUM_REQUESTS = 2
NUM_K_HEADS = 16
NUM_V_HEADS = {"27B": 48, "35B-A3B": 32}
HEAD_DIM = 128
NUM_TAPS = 4


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Label and launch, on memory that nobody fills."""
    for rows, name, state_dtype in (
        (4, "27B", torch.float32),
        (2, "35B-A3B", torch.bfloat16),
    ):
        heads = NUM_V_HEADS[name]
        yield f"verify {rows} {name} {state_dtype}", partial(verify, heads, state_dtype, rows)
        yield f"commit {rows} {name} {state_dtype}", partial(commit, heads, state_dtype, rows)


def make_stash(num_v_heads: int, rows: int) -> VerifyStash:
    """The stash of a bf16 model."""
    return allocate_stash(
        NUM_LAYERS,
        NUM_REQUESTS,
        rows,
        num_k_heads=NUM_K_HEADS,
        num_v_heads=num_v_heads,
        head_k_dim=HEAD_DIM,
        head_v_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def make_pools(num_v_heads: int, state_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Conv rings and states of all layers."""
    num_channels = (2 * NUM_K_HEADS + num_v_heads) * HEAD_DIM
    return (
        torch.empty(NUM_LAYERS, NUM_SLOTS, NUM_TAPS, num_channels, dtype=torch.bfloat16),
        torch.empty(NUM_LAYERS, NUM_SLOTS, num_v_heads, HEAD_DIM, HEAD_DIM, dtype=state_dtype),
    )


def verify(num_v_heads: int, state_dtype: torch.dtype, rows: int) -> object:
    """A verify step of two requests in bf16."""
    bf16 = torch.bfloat16
    num_channels = (2 * NUM_K_HEADS + num_v_heads) * HEAD_DIM
    num_columns = num_channels + num_v_heads * HEAD_DIM + 2 * num_v_heads
    conv_pool, state_pool = make_pools(num_v_heads, state_dtype)
    return gdn_verify(
        torch.empty(NUM_REQUESTS * rows, num_columns, dtype=bf16),
        torch.empty(NUM_REQUESTS * rows, dtype=torch.int64),
        torch.empty(NUM_REQUESTS, dtype=torch.int64),
        torch.empty(num_channels, NUM_TAPS, dtype=bf16),
        torch.empty(num_v_heads),
        torch.empty(num_v_heads),
        torch.empty(HEAD_DIM, dtype=bf16),
        conv_pool[0],
        state_pool[0],
        *make_stash(num_v_heads, rows).layer(0),
        NUM_K_HEADS,
        1e-6,
        rows,
    )


def commit(num_v_heads: int, state_dtype: torch.dtype, rows: int) -> object:
    """The commit of two requests."""
    conv_pool, state_pool = make_pools(num_v_heads, state_dtype)
    return gdn_commit(
        *make_stash(num_v_heads, rows),
        torch.empty(NUM_REQUESTS, dtype=torch.int64),
        torch.empty(NUM_REQUESTS, dtype=torch.int64),
        torch.empty(NUM_REQUESTS, dtype=torch.int64),
        conv_pool,
        state_pool,
        NUM_K_HEADS,
    )
