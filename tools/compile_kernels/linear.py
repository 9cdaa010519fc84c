"""The products and norms of the two large geometries, as production launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphs.kernels.linear.ops import gated_linear, linear, swiglu
from graphs.kernels.norm.ops import add_rms_norm, rms_norm


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never read: the kernels are only compiled."""
    return torch.empty(shape, dtype=dtype)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """One call per distinct specialisation."""
    for num_rows in (1, 2, 4, 8, 16, 32, 64):
        x = empty(num_rows, 5120)
        yield (
            f"27B in_proj, gate_up of {num_rows} rows",
            lambda x=x: (linear(x, empty(16480, 5120)), gated_linear(x, empty(2 * 17408, 5120))),
        )
    for num_rows in (1, 8, 16):
        x, inner = empty(num_rows, 2048), empty(num_rows, 512)
        yield (
            f"35B-A3B qkv, shared expert of {num_rows} rows",
            lambda x=x, inner=inner: (
                linear(x, empty(9216, 2048)),
                gated_linear(x, empty(1024, 2048)),
                linear(inner, empty(2048, 512)),
            ),
        )
    for num_rows, depth in ((1, 256), (1, 320), (8, 256)):
        x = empty(num_rows, depth, dtype=torch.float32)
        weight = empty(1536, depth, dtype=torch.float32)
        yield (
            f"fp32 products of {num_rows} rows of {depth}",
            lambda x=x, weight=weight: (linear(x, weight), gated_linear(x, weight)),
        )
    yield "27B swiglu of 8192 rows", lambda: swiglu(empty(8192, 2 * 17408))
    yield (
        "27B norms of 8192 rows",
        lambda: (
            rms_norm(empty(8192, 5120), empty(5120), 1e-6),
            add_rms_norm(empty(8192, 5120), empty(8192, 5120), empty(5120), 1e-6),
        ),
    )
