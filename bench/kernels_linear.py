"""Products of few rows with the weights of the large geometries, and norms.

`cublas_linear` is torch's product at the same sizes, for comparison. Weights above 140 MB have
the bar of 4.0 TB/s at one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, Ceiling, KernelCase
from graphs.kernels.linear.ops import gated_linear, linear
from graphs.kernels.norm.ops import add_rms_norm

DENSE, SPARSE = "Qwen3.6-27B", "Qwen3.6-35B-A3B"
WIDTH = 5120
BAR_WEIGHT_BYTES = 140e6
BAR_BYTES_PER_S = 4.0e12
# Geometry, name, weight [N, K], rows.
WEIGHTS = (
    (DENSE, "gdn_in", (16480, 5120), (1, 4, 8, 16, 64)),
    (DENSE, "gate_up", (34816, 5120), (1, 4, 8, 16, 64)),
    (DENSE, "down", (5120, 17408), (1, 4, 8, 16, 64)),
    (DENSE, "qkv", (14336, 5120), (1,)),
    (DENSE, "lm_head", (248320, 5120), (1,)),
    (DENSE, "gdn_out", (5120, 6144), (1, 16)),
    (SPARSE, "gdn_in", (12352, 2048), (1, 16)),
    (SPARSE, "qkv", (9216, 2048), (1,)),
    (SPARSE, "out", (2048, 4096), (1, 16)),
    (SPARSE, "shared_up", (1024, 2048), (1,)),
    (SPARSE, "shared_down", (2048, 512), (1,)),
)
GATED = (
    (DENSE, "gate_up", (34816, 5120), (1, 4, 8, 16, 64)),
    (SPARSE, "shared_up", (1024, 2048), (1,)),
)
NORM_ROWS = (1, 64, 8192)


def cases() -> Iterator[KernelCase]:
    """Each product by our op and by torch's, then the norms."""
    for geometry, name, shape, row_counts in WEIGHTS:
        for num_rows in row_counts:
            yield product_case(geometry, f"linear.{name}", linear, shape, num_rows)
            yield product_case(geometry, f"cublas_linear.{name}", F.linear, shape, num_rows)
    for geometry, name, shape, row_counts in GATED:
        for num_rows in row_counts:
            yield product_case(geometry, f"gated_linear.{name}", gated_linear, shape, num_rows)
    for num_rows in NORM_ROWS:
        yield norm_case(num_rows)


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def num_buffers(run_bytes: int) -> int:
    """How many buffers the runs must rotate through so that none is still cached."""
    return -(-MIN_BYTES_PER_REPLAY // run_bytes)


def product_case(
    geometry: str,
    name: str,
    multiply: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, int],
    num_rows: int,
) -> KernelCase:
    """One product of num_rows rows with random weights of this shape."""
    num_outputs, depth = shape
    weight_bytes = 2 * num_outputs * depth
    x = random_bf16(num_rows, depth)
    weights = [random_bf16(num_outputs, depth) for _ in range(num_buffers(weight_bytes))]
    width = num_outputs // 2 if multiply is gated_linear else num_outputs
    num_bytes = weight_bytes + 2 * num_rows * (depth + width)
    has_bar = num_rows == 1 and weight_bytes > BAR_WEIGHT_BYTES and multiply is not F.linear
    return KernelCase(
        name=name,
        geometry=geometry,
        dtype="bfloat16",
        batch=num_rows,
        runs=[partial(multiply, x, weight) for weight in weights],
        ceiling=Ceiling.READ,
        num_bytes=num_bytes,
        flops=2 * num_rows * num_outputs * depth,
        max_us=num_bytes / BAR_BYTES_PER_S * 1e6 if has_bar else None,
    )


def norm_case(num_rows: int) -> KernelCase:
    """Residual sum and norm: two tensors read, two written."""
    num_bytes = 4 * 2 * num_rows * WIDTH + 2 * WIDTH
    weight = random_bf16(WIDTH)
    rows = [
        (random_bf16(num_rows, WIDTH), random_bf16(num_rows, WIDTH))
        for _ in range(min(64, num_buffers(num_bytes)))
    ]
    return KernelCase(
        name="add_rms_norm",
        geometry=DENSE,
        dtype="bfloat16",
        batch=num_rows,
        runs=[partial(add_rms_norm, x, residual, weight, 1e-6) for x, residual in rows],
        ceiling=Ceiling.COPY,
        num_bytes=num_bytes,
    )
