"""The GDN prefill launches that serving makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphs.kernels.gdn.prefill import gdn_prefill

NUM_K_HEADS = 16
NUM_V_HEADS = {"27B": 48, "35B-A3B": 32}
HEAD_DIM = 128
NUM_TAPS = 4


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Label and launch, on memory that nobody fills."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, heads in NUM_V_HEADS.items():
        yield f"prefill {name} {fp32}", partial(prefill, NUM_K_HEADS, heads, bf16, fp32)
    for state_dtype in (bf16, torch.float16):
        yield f"prefill 27B {state_dtype}", partial(prefill, NUM_K_HEADS, 48, bf16, state_dtype)
    yield "prefill fp32 model", partial(prefill, NUM_K_HEADS, 32, fp32, fp32)


def prefill(
    num_k_heads: int, num_v_heads: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> object:
    """A prefill of 70 rows of two requests, in three chunks."""
    num_channels = (2 * num_k_heads + num_v_heads) * HEAD_DIM
    num_columns = num_channels + num_v_heads * HEAD_DIM + 2 * num_v_heads
    return gdn_prefill(
        torch.empty(70, num_columns, dtype=dtype),
        torch.empty(70, dtype=torch.int64),
        torch.empty(3, dtype=torch.int64),
        torch.empty(3, 2, dtype=torch.int64),
        torch.empty(3, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64),
        torch.empty(num_channels, NUM_TAPS, dtype=dtype),
        torch.empty(num_v_heads),
        torch.empty(num_v_heads),
        torch.empty(HEAD_DIM, dtype=dtype),
        torch.empty(3, NUM_TAPS, num_channels, dtype=dtype),
        torch.empty(3, num_v_heads, HEAD_DIM, HEAD_DIM, dtype=state_dtype),
        num_k_heads,
        1e-6,
    )
