"""Drawing tokens at the sizes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from graphs.kernels.sample.ops import draw_tokens

VOCAB_SIZES = {"Qwen3.6": 248320, "tiny": 501}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """One call for each vocabulary: nothing else is compiled in."""
    for name, vocab_size in VOCAB_SIZES.items():
        yield f"{name} draw", partial(draw, vocab_size)


def draw(vocab_size: int) -> object:
    """Two rows that nobody fills."""
    return draw_tokens(
        torch.empty(2, vocab_size),
        torch.empty(2, vocab_size),
        torch.empty(2, dtype=torch.bool),
        torch.empty(2, dtype=torch.int64),
        torch.empty(2),
        torch.empty(2),
    )
