"""The attention kernels at the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from graphs.kernels.attention import ops

PAGE_SIZE = 64
GEOMETRIES = {"27B": (24, 4), "35B-A3B": (16, 2)}  # query heads, key/value heads
HEAD_DIM = 256
ROTARY_DIM = 64


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """One call for each specialisation that serving uses."""
    for name, (num_q_heads, num_kv_heads) in GEOMETRIES.items():
        sizes = (num_q_heads, num_kv_heads)
        for dtype in (torch.bfloat16, torch.float32):
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            yield f"{label} prepare", partial(prepare, *sizes, dtype)
            yield f"{label} decode", partial(decode, *sizes, dtype, 2, 1)
            if dtype == torch.bfloat16:
                yield f"{label} decode, some requests", partial(decode, *sizes, dtype, 16, 1)
                yield f"{label} decode, many requests", partial(decode, *sizes, dtype, 256, 1)
                yield f"{label} verify", partial(decode, *sizes, dtype, 2, 4)
                yield f"{label} verify, many requests", partial(decode, *sizes, dtype, 64, 4)
            else:
                yield f"{label} decode, some requests", partial(decode, *sizes, dtype, 16, 1)
            yield f"{label} prefill", partial(prefill, *sizes, dtype)


def pool(num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(3, PAGE_SIZE, num_kv_heads, HEAD_DIM, dtype=dtype)


def rows(num_rows: int, num_q_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """qkv of num_rows rows."""
    return torch.empty(num_rows, 2 * (num_q_heads + num_kv_heads) * HEAD_DIM, dtype=dtype)


def indices(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def prepare(num_q_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """Norm, rotate, store."""
    ops.prepare_qkv(
        rows(2, num_q_heads, num_kv_heads, dtype),
        torch.empty(HEAD_DIM, dtype=dtype),
        torch.empty(HEAD_DIM, dtype=dtype),
        torch.empty(ROTARY_DIM // 2),
        indices(2),
        indices(2),
        pool(num_kv_heads, dtype),
        pool(num_kv_heads, dtype),
        num_q_heads,
        1e-6,
    )


def decode(
    num_q_heads: int, num_kv_heads: int, dtype: torch.dtype, num_requests: int, num_rows: int
) -> None:
    """Decode or verify; many requests split only long contexts."""
    ops.paged_decode_attention(
        torch.empty(num_requests * num_rows, num_q_heads, HEAD_DIM, dtype=dtype),
        rows(num_requests * num_rows, num_q_heads, num_kv_heads, dtype),
        pool(num_kv_heads, dtype),
        pool(num_kv_heads, dtype),
        indices(num_requests, 512),
        indices(num_requests),
        num_rows,
    )


def prefill(num_q_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """A few chunks."""
    ops.paged_prefill_attention(
        torch.empty(80, num_q_heads, HEAD_DIM, dtype=dtype),
        rows(80, num_q_heads, num_kv_heads, dtype),
        pool(num_kv_heads, dtype),
        pool(num_kv_heads, dtype),
        indices(2, 512),
        indices(2),
        indices(3),
        indices(2, 2),
    )
