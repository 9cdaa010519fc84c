"""Choosing tokens at the sizes of real models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch

from engine.sampler import sample
from engine.sampling_rows import SamplingTable
from engine.token_step import GREEDY, SAMPLED
from graphs.kernels.kernel_set import TRITON_SAMPLE
from graphs.kernels.sample.ops import argmax

CPU = torch.device("cpu")
VOCAB_SIZES = {"Qwen3.6": 248320, "tiny": 501}
ROW_COUNTS = (1, 64)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Greedy and sampled steps of each vocabulary: nothing else is compiled in."""
    for name, vocab_size in VOCAB_SIZES.items():
        for num_rows in ROW_COUNTS:
            yield f"{name} greedy", partial(choose_greedy, num_rows, vocab_size)
        yield f"{name} sampled", partial(choose_sampled, vocab_size)


def choose_greedy(num_rows: int, vocab_size: int) -> object:
    """Rows that nobody fills."""
    return argmax(torch.empty(num_rows, vocab_size, dtype=torch.bfloat16))


def choose_sampled(vocab_size: int) -> object:
    """Two rows that nobody fills, with and without adjustments and truncation."""
    table = SamplingTable(2, vocab_size, CPU)
    rows = torch.zeros(2, dtype=torch.int64)
    logits = torch.empty(2, vocab_size, dtype=torch.bfloat16)
    plain = dataclasses.replace(GREEDY, is_all_greedy=False)
    return [sample(logits, table, rows, rows, plan, TRITON_SAMPLE) for plan in (SAMPLED, plain)]
