"""The GDN kernels at the sizes of real models, each run on another layer's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench import kernels_gdn_prefill, kernels_gdn_verify
from bench.kernel_timing import Ceiling, KernelCase
from graphs.kernels.gdn.decode import gdn_decode

NUM_K_HEADS = 16
NUM_V_HEADS = {"Qwen3.6-27B": 48, "Qwen3.6-35B-A3B": 32}
HEAD_DIM = 128
NUM_TAPS = 4
MIN_BYTES_IN_ALL = 400 * 2**20
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def cases() -> Iterator[KernelCase]:
    """Decode at each batch size, then verify and commit, then prefill."""
    for geometry in NUM_V_HEADS:
        for batch in (1, 16, 64):
            yield decode_case(geometry, batch, torch.float32)
    yield decode_case("Qwen3.6-27B", 64, torch.bfloat16)
    yield from kernels_gdn_verify.cases()
    yield from kernels_gdn_prefill.cases()


def decode_case(geometry: str, batch: int, state_dtype: torch.dtype) -> KernelCase:
    """One decode step of `batch` requests with bf16 activations; dtype names the state's."""
    is_27b = geometry == "Qwen3.6-27B"
    runs, num_bytes = decode_runs(NUM_V_HEADS[geometry], batch, state_dtype)
    return KernelCase(
        name="gdn_decode",
        geometry=geometry,
        dtype=DTYPE_NAMES[state_dtype],
        batch=batch,
        runs=runs,
        ceiling=Ceiling.COPY,
        num_bytes=num_bytes,
        min_share=0.85 if is_27b and batch == 64 and state_dtype is torch.float32 else None,
        max_us=12.0 if is_27b and batch == 1 else None,
    )


def decode_runs(
    num_v_heads: int, batch: int, state_dtype: torch.dtype
) -> tuple[list[Callable[[], Tensor]], int]:
    """The same step on the state of as many layers as it takes to miss the L2 cache."""
    bf16 = torch.bfloat16
    num_channels = (2 * NUM_K_HEADS + num_v_heads) * HEAD_DIM
    value_dim = num_v_heads * HEAD_DIM
    num_columns = num_channels + value_dim + 2 * num_v_heads
    state_bytes = batch * value_dim * HEAD_DIM * state_dtype.itemsize
    num_bytes = 2 * state_bytes + 2 * (
        batch * (num_columns + value_dim + NUM_TAPS * num_channels) + num_channels * NUM_TAPS
    )
    num_layers = max(MIN_BYTES_IN_ALL // (2 * state_bytes), 2)
    conv_pool = torch.randn(
        num_layers, 1 + batch, NUM_TAPS, num_channels, device="cuda", dtype=bf16
    )
    state_pool = torch.randn(
        num_layers, 1 + batch, num_v_heads, HEAD_DIM, HEAD_DIM, device="cuda"
    ).to(state_dtype)
    projected = torch.randn(batch, num_columns, device="cuda", dtype=bf16)
    positions = torch.randint(1024, 2048, (batch,), device="cuda")
    slots = torch.randperm(batch, device="cuda") + 1
    conv_weight = torch.randn(num_channels, NUM_TAPS, device="cuda", dtype=bf16)
    a_log, dt_bias = (torch.randn(num_v_heads, device="cuda") for _ in range(2))
    norm_weight = torch.randn(HEAD_DIM, device="cuda", dtype=bf16)
    runs = [
        partial(
            gdn_decode,
            projected,
            positions,
            slots,
            conv_weight,
            a_log,
            dt_bias,
            norm_weight,
            conv_pool[layer],
            state_pool[layer],
            NUM_K_HEADS,
            1e-6,
        )
        for layer in range(num_layers)
    ]
    return runs, num_bytes
