"""The products and norms of the two large geometries, as production launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphs.kernels.linear.ops import gated_linear, linear, swiglu
from graphs.kernels.norm.ops import add_rms_norm, rms_norm

FP32 = torch.float32


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Never read: the kernels are only compiled."""
    return torch.empty(shape, dtype=dtype)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """One call per distinct specialisation."""
    for num_rows in (1, 2, 4, 32, 64):  # both matrix-vector kernels, then each BLOCK_M
        x = empty(num_rows, 5120)
        yield (
            f"27B in_proj, gate_up of {num_rows} rows",
            lambda x=x: (linear(x, empty(16480, 5120)), gated_linear(x, empty(2 * 17408, 5120))),
        )
    yield "27B down of 1 row", lambda: linear(empty(1, 17408), empty(5120, 17408))
    yield "27B lm_head of 1 row", lambda: linear(empty(1, 5120), empty(248320, 5120))
    yield "27B out_proj of 1 row", lambda: linear(empty(1, 6144), empty(5120, 6144))
    yield "35B-A3B qkv of 1 row", lambda: linear(empty(1, 2048), empty(9216, 2048))
    for num_rows in (1, 4, 8):
        x = empty(num_rows, 4096)
        yield f"35B-A3B out_proj of {num_rows} rows", lambda x=x: linear(x, empty(2048, 4096))
    yield "35B-A3B shared_up of 1 row", lambda: linear(empty(1, 2048), empty(1024, 2048))
    yield "fp32 product", lambda: linear(empty(1, 8704, dtype=FP32), empty(1536, 8704, dtype=FP32))
    yield "27B swiglu of 8192 rows", lambda: swiglu(empty(8192, 2 * 17408))
    yield (
        "27B norms of 8192 rows",
        lambda: (
            rms_norm(empty(8192, 5120), empty(5120), 1e-6),
            add_rms_norm(empty(8192, 5120), empty(8192, 5120), empty(5120), 1e-6),
        ),
    )
