"""The mixture of experts at the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphs.kernels.moe import ops

BF16 = torch.bfloat16


def mlp_call(
    num_rows: int,
    num_experts: int,
    top_k: int,
    *,
    hidden: int = 2048,
    inner: int = 512,
    shared: int = 512,
    dtype: torch.dtype = BF16,
) -> Callable[[], object]:
    """One call of the op on memory that is never touched."""
    shapes = (
        (num_rows, hidden),
        (num_experts, hidden),
        (num_experts, 2 * inner, hidden),
        (num_experts, hidden, inner),
        (2 * shared, hidden),
        (hidden, shared),
        (1, hidden),
    )
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    return partial(ops.moe_mlp, *tensors, top_k, True)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each path of the op: a row, two, few rows, an expert's tile half full, and thousands."""
    for num_rows in (1, 2, 64, 500, 2048, 8192):
        yield f"35B-A3B {num_rows} rows", mlp_call(num_rows, 256, 8)
    for num_rows in (1, 64):
        yield f"Next-80B-A3B {num_rows} rows", mlp_call(num_rows, 512, 10)
    yield "hidden 2560, inner 640, 64 rows", mlp_call(64, 512, 10, hidden=2560, inner=640)
    yield "35B-A3B fp32 1 row", mlp_call(1, 256, 8, dtype=torch.float32)
    yield "35B-A3B fp32 500 rows", mlp_call(500, 256, 8, dtype=torch.float32)
    yield (
        "tiny fp32 65 rows",
        mlp_call(65, 5, 2, hidden=40, inner=12, shared=20, dtype=torch.float32),
    )
