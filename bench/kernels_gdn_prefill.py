"""The GDN prefill at the sizes of real models: one long prompt, and several short ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from bench.kernel_timing import Ceiling, KernelCase
from graphs.kernels.gdn.prefill import CHUNK, gdn_prefill

NUM_K_HEADS = 16
NUM_V_HEADS = {"Qwen3.6-27B": 48, "Qwen3.6-35B-A3B": 32}
HEAD_DIM = 128
NUM_TAPS = 4
EPS = 1e-6


def cases() -> Iterator[KernelCase]:
    """One run alone moves far more than the L2 cache holds."""
    yield prefill_case("Qwen3.6-27B", 1, 8192, max_us=900.0)
    yield prefill_case("Qwen3.6-27B", 8, 1024)
    yield prefill_case("Qwen3.6-27B", 1, 512)
    yield prefill_case("Qwen3.6-35B-A3B", 1, 8192)
    yield prefill_case("Qwen3.6-35B-A3B", 8, 1024)


def prefill_case(
    geometry: str, batch: int, rows_per_request: int, max_us: float | None = None
) -> KernelCase:
    """`batch` fresh requests of the same length, bf16 activations, fp32 states."""
    heads = NUM_V_HEADS[geometry]
    arguments = prefill_arguments(heads, [rows_per_request] * batch)
    projected, chunks, conv_weight = arguments[0], arguments[3], arguments[6]
    state_bytes = 4 * heads * HEAD_DIM * HEAD_DIM
    num_bytes = 2 * (
        projected.numel() + projected.shape[0] * heads * HEAD_DIM + conv_weight.numel()
    ) + state_bytes * (chunks.shape[0] + batch)
    return KernelCase(
        name="gdn_prefill",
        geometry=geometry,
        dtype="bfloat16",
        batch=batch,
        rows_per_request=rows_per_request,
        runs=[partial(gdn_prefill, *arguments, NUM_K_HEADS, EPS)] * 2,
        ceiling=Ceiling.COPY,
        num_bytes=num_bytes,
        max_us=max_us,
    )


def prefill_arguments(num_v_heads: int, lens: list[int]) -> list[Tensor]:
    """The tensors of `gdn_prefill`, in its order, for fresh requests of random rows."""
    bf16, cuda = torch.bfloat16, torch.device("cuda")
    num_channels = (2 * NUM_K_HEADS + num_v_heads) * HEAD_DIM
    num_columns = num_channels + num_v_heads * HEAD_DIM + 2 * num_v_heads
    row_starts = [sum(lens[:index]) for index in range(len(lens) + 1)]
    spans = list(pairwise(row_starts))
    chunks = [[index, row] for index, span in enumerate(spans) for row in range(*span, CHUNK)]
    chunk_starts = [sum(chunk[0] < index for chunk in chunks) for index in range(len(lens) + 1)]
    return [
        torch.randn(row_starts[-1], num_columns, device=cuda, dtype=bf16),
        torch.cat([torch.arange(num_rows, device=cuda) for num_rows in lens]),
        torch.tensor(row_starts, device=cuda),
        torch.tensor(chunks, device=cuda),
        torch.tensor(chunk_starts, device=cuda),
        torch.arange(1, len(lens) + 1, device=cuda),
        torch.randn(num_channels, NUM_TAPS, device=cuda, dtype=bf16) * 0.5,
        torch.randn(num_v_heads, device=cuda) * 0.5,
        torch.randn(num_v_heads, device=cuda),
        torch.randn(HEAD_DIM, device=cuda, dtype=bf16),
        torch.randn(len(lens) + 1, NUM_TAPS, num_channels, device=cuda, dtype=bf16),
        torch.randn(len(lens) + 1, num_v_heads, HEAD_DIM, HEAD_DIM, device=cuda),
    ]
