"""The GDN verify of a layer and the commit of all layers, at the sizes of the 27B model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernel_timing import Ceiling, KernelCase
from graphs.kernels.gdn.commit import gdn_commit
from graphs.kernels.gdn.stash import VerifyStash, allocate_stash, stash_bytes_per_row, stash_widths
from graphs.kernels.gdn.verify import gdn_verify

GEOMETRY = "Qwen3.6-27B"
NUM_LAYERS = 48
NUM_K_HEADS = 16
NUM_V_HEADS = 48
HEAD_DIM = 128
NUM_TAPS = 4
ROWS = 4
SIZES = {
    "num_k_heads": NUM_K_HEADS,
    "num_v_heads": NUM_V_HEADS,
    "head_k_dim": HEAD_DIM,
    "head_v_dim": HEAD_DIM,
}
NUM_CHANNELS, KEY_DIM, VALUE_DIM = stash_widths(**SIZES)
STATE_BYTES = VALUE_DIM * HEAD_DIM * torch.float32.itemsize
STASH_BYTES = stash_bytes_per_row(**SIZES, dtype_bytes=torch.bfloat16.itemsize)


def cases() -> Iterator[KernelCase]:
    """Verify steps of one and of 16 requests, and the commit of 16."""
    for batch in (1, 16):
        yield verify_case(batch)
    yield commit_case(16)


def make_memory(batch: int) -> tuple[VerifyStash, torch.Tensor, torch.Tensor]:
    """Stash, conv rings and fp32 states of all layers, filled with random numbers."""
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    stash = allocate_stash(NUM_LAYERS, batch, ROWS, **SIZES, dtype=bf16, device=cuda)
    for tensor in stash:
        tensor.uniform_()
    ring = NUM_LAYERS, 1 + batch, NUM_TAPS, NUM_CHANNELS
    state = NUM_LAYERS, 1 + batch, NUM_V_HEADS, HEAD_DIM, HEAD_DIM
    conv_pool = torch.randn(ring, device=cuda, dtype=bf16)
    return stash, conv_pool, torch.randn(state, device=cuda)


def verify_case(batch: int) -> KernelCase:
    """Four rows of each request through one layer, on another layer's state each run."""
    bf16 = torch.bfloat16
    num_columns = NUM_CHANNELS + VALUE_DIM + 2 * NUM_V_HEADS
    stash, conv_pool, state_pool = make_memory(batch)
    projected = torch.randn(batch * ROWS, num_columns, device="cuda", dtype=bf16)
    starts = torch.randint(1024, 2048, (batch, 1), device="cuda")
    positions = (starts + torch.arange(ROWS, device="cuda")).flatten()
    slots = torch.randperm(batch, device="cuda") + 1
    conv_weight = torch.randn(NUM_CHANNELS, NUM_TAPS, device="cuda", dtype=bf16)
    a_log, dt_bias = (torch.randn(NUM_V_HEADS, device="cuda") for _ in range(2))
    norm_weight = torch.randn(HEAD_DIM, device="cuda", dtype=bf16)
    runs: list[Callable[[], object]] = [
        partial(
            gdn_verify,
            projected,
            positions,
            slots,
            conv_weight,
            a_log,
            dt_bias,
            norm_weight,
            conv_pool[layer],
            state_pool[layer],
            *stash.layer(layer),
            NUM_K_HEADS,
            1e-6,
            ROWS,
        )
        for layer in range(NUM_LAYERS)
    ]
    row_bytes = 2 * (num_columns + VALUE_DIM) + STASH_BYTES
    ring_bytes = 2 * (NUM_TAPS - 1) * NUM_CHANNELS
    return KernelCase(
        name="gdn_verify",
        geometry=GEOMETRY,
        dtype="float32",
        batch=batch,
        rows_per_request=ROWS,
        runs=runs,
        ceiling=Ceiling.READ,
        num_bytes=batch * (STATE_BYTES + ROWS * row_bytes + ring_bytes)
        + 2 * NUM_CHANNELS * NUM_TAPS,
    )


def commit_case(batch: int) -> KernelCase:
    """All rows of all requests accepted, all layers in one launch."""
    stash, conv_pool, state_pool = make_memory(batch)
    starts = torch.randint(1024, 2048, (batch,), device="cuda")
    counts = torch.full((batch,), ROWS, device="cuda")
    slots = torch.randperm(batch, device="cuda") + 1
    ring_bytes = ROWS * 2 * NUM_CHANNELS
    return KernelCase(
        name="gdn_commit",
        geometry=GEOMETRY,
        dtype="float32",
        batch=batch,
        rows_per_request=ROWS,
        runs=[
            partial(gdn_commit, *stash, starts, counts, slots, conv_pool, state_pool, NUM_K_HEADS)
        ],
        ceiling=Ceiling.COPY,
        num_bytes=NUM_LAYERS * batch * (2 * STATE_BYTES + ROWS * STASH_BYTES + ring_bytes),
        max_us=1200.0,
    )
