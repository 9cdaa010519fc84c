"""The GDN launches that serving makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphs.kernels.gdn.decode import gdn_decode
from tools.compile_kernels import gdn_prefill, gdn_verify

NUM_SLOTS = 3
NUM_K_HEADS = 16
NUM_V_HEADS = {"27B": 48, "35B-A3B": 32}
HEAD_DIM = 128
NUM_TAPS = 4


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Label and launch, on memory that nobody fills."""
    for name, heads in NUM_V_HEADS.items():
        for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield f"decode {name} {state_dtype}", partial(decode, heads, state_dtype)
    yield from gdn_verify.calls()
    yield from gdn_prefill.calls()


def decode(num_v_heads: int, state_dtype: torch.dtype) -> object:
    """A decode step of two requests in bf16."""
    num_channels = (2 * NUM_K_HEADS + num_v_heads) * HEAD_DIM
    num_columns = num_channels + num_v_heads * HEAD_DIM + 2 * num_v_heads
    bf16 = torch.bfloat16
    return gdn_decode(
        torch.empty(2, num_columns, dtype=bf16),
        torch.empty(2, dtype=torch.int64),
        torch.empty(2, dtype=torch.int64),
        torch.empty(num_channels, NUM_TAPS, dtype=bf16),
        torch.empty(num_v_heads),
        torch.empty(num_v_heads),
        torch.empty(HEAD_DIM, dtype=bf16),
        torch.empty(NUM_SLOTS, NUM_TAPS, num_channels, dtype=bf16),
        torch.empty(NUM_SLOTS, num_v_heads, HEAD_DIM, HEAD_DIM, dtype=state_dtype),
        NUM_K_HEADS,
        1e-6,
    )
