"""Drawing a token for each row of a large vocabulary, from flat and peaked distributions.

The floor is reading scores and noise once. Rows draw on their own, and the slowest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, Ceiling, KernelCase
from graphs.kernels.sample.ops import draw_tokens
from graphs.kernels.sample.reference import gumbel_noise

GEOMETRY = "Qwen3.6-27B"
VOCAB_SIZE = 248320
ROW_COUNTS = (1, 16, 64)
TEMPERATURE = 0.7
# Standard deviation of the logits: the best token has a thousandth of the mass, or much of it.
SPREADS = {"flat": 1.0, "peaked": 4.0}
# top_k, top_p
TRUNCATIONS = {
    "top_p": (VOCAB_SIZE, 0.95),
    "top_k": (50, 1.0),
    "both": (50, 0.95),
}
# Microseconds for 64 rows.
MAX_US = {"top_p": 150.0, "top_k": 250.0, "both": 250.0}


def cases() -> Iterator[KernelCase]:
    """Every truncation of every shape of distribution."""
    for shape in SPREADS:
        for truncation in TRUNCATIONS:
            for num_rows in ROW_COUNTS:
                yield draw_case(shape, truncation, num_rows)


def random_inputs(num_rows: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Scores and noise."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, device="cuda") * spread
    seeds = seed * num_rows + torch.arange(num_rows, device="cuda")
    token_ids = torch.arange(VOCAB_SIZE, device="cuda")[None]
    noise = gumbel_noise(seeds, torch.zeros_like(seeds), token_ids)
    return (logits - logits.amax(-1, keepdim=True)) / TEMPERATURE, noise


def draw_case(shape: str, truncation: str, num_rows: int) -> KernelCase:
    """One draw of num_rows rows, each with scores and noise of its own."""
    num_bytes = 2 * 4 * num_rows * VOCAB_SIZE
    num_buffers = -(-MIN_BYTES_PER_REPLAY // num_bytes)
    top_k, top_p = TRUNCATIONS[truncation]
    limits = (
        torch.zeros(num_rows, dtype=torch.bool, device="cuda"),
        torch.full((num_rows,), top_k, device="cuda"),
        torch.full((num_rows,), top_p, device="cuda"),
        torch.zeros(num_rows, device="cuda"),
    )
    inputs = [random_inputs(num_rows, SPREADS[shape], seed) for seed in range(num_buffers)]
    return KernelCase(
        name=f"draw.{shape}.{truncation}",
        geometry=GEOMETRY,
        dtype="float32",
        batch=num_rows,
        runs=[partial(draw_tokens, scaled, noise, *limits) for scaled, noise in inputs],
        ceiling=Ceiling.READ,
        num_bytes=num_bytes,
        max_us=MAX_US[truncation] if num_rows == max(ROW_COUNTS) else None,
    )
