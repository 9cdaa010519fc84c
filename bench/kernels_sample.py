"""Choosing a token for each row of a large vocabulary, from flat and peaked distributions.

The floors are reading logits or scores once, and writing scores. Rows draw on their own, and the
slowest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, Ceiling, KernelCase
from engine.request import SamplingParams
from engine.sampler import sample
from engine.sampling_rows import SamplingTable
from engine.token_step import SAMPLED
from graphs.kernels.kernel_set import TRITON_SAMPLE
from graphs.kernels.sample.ops import adjust_logits, argmax, draw_tokens

GEOMETRY = "Qwen3.6-27B"
VOCAB_SIZE = 248320
ROW_COUNTS = (1, 16, 64)
TEMPERATURE = 0.7
PENALTY = 0.5
# Standard deviation of the logits: the best token has a thousandth of the mass, or much of it.
SPREADS = {"flat": 1.0, "peaked": 4.0}
# top_k, top_p
TRUNCATIONS = {
    "none": (0, 1.0),
    "top_p": (0, 0.95),
    "top_k": (50, 1.0),
    "both": (50, 0.95),
}
# Microseconds, by name and rows.
MAX_US = {
    ("argmax", 1): 6.0,
    ("argmax", 64): 15.0,
    ("adjust.plain", 64): 100.0,
    ("adjust.penalties", 64): 100.0,
    **{(f"draw.{shape}.top_k", 64): 250.0 for shape in SPREADS},
    **{(f"draw.{shape}.both", 64): 250.0 for shape in SPREADS},
    **{(f"draw.{shape}.{kind}", 1): 100.0 for shape in SPREADS for kind in ("top_k", "both")},
    **{(f"sample.{shape}", 64): 400.0 for shape in SPREADS},
}


def cases() -> Iterator[KernelCase]:
    """Greedy choice, adjustments, every truncation of every shape, and all of a sampled step."""
    for num_rows in ROW_COUNTS:
        yield argmax_case(num_rows)
        for is_penalised in (False, True):
            yield adjust_case(num_rows, is_penalised)
        for shape in SPREADS:
            for truncation in TRUNCATIONS:
                yield draw_case(shape, truncation, num_rows)
            yield sample_case(shape, num_rows)


def random_logits(num_rows: int, spread: float, bytes_per_row: int) -> list[Tensor]:
    """bf16 logits, often enough to miss the L2 cache."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    return [
        (torch.randn(num_rows, VOCAB_SIZE, generator=generator, device="cuda") * spread).bfloat16()
        for _ in range(-(-MIN_BYTES_PER_REPLAY // (num_rows * bytes_per_row)))
    ]


def filled_table(num_rows: int, params: SamplingParams) -> SamplingTable:
    """Every slot given to a request with a prompt and a few tokens."""
    table = SamplingTable(num_rows, VOCAB_SIZE, torch.device("cuda"))
    for slot in range(1, num_rows + 1):
        table.set_row(
            slot,
            params,
            seed=slot,
            eos_ids=[1, 2],
            prompt_token_ids=range(1000),
            output_token_ids=range(500, 700),
        )
    return table


def sampling_params(truncation: str, *, is_penalised: bool) -> SamplingParams:
    """One request's; the penalties bring everything else that changes logits with them."""
    top_k, top_p = TRUNCATIONS[truncation]
    if not is_penalised:
        return SamplingParams(temperature=TEMPERATURE, top_k=top_k, top_p=top_p)
    return SamplingParams(
        temperature=TEMPERATURE,
        top_k=top_k,
        top_p=top_p,
        presence_penalty=PENALTY,
        frequency_penalty=PENALTY,
        repetition_penalty=1.0 + PENALTY,
        logit_bias=dict.fromkeys(range(0, 3000, 10), 1.0),
        min_tokens=10,
    )


def build_case(
    name: str, num_rows: int, runs: list[partial[object]], num_bytes: int, *, ceiling: Ceiling
) -> KernelCase:
    """A case of bf16 logits with its bar."""
    return KernelCase(
        name=name,
        geometry=GEOMETRY,
        dtype="bfloat16",
        batch=num_rows,
        runs=runs,
        ceiling=ceiling,
        num_bytes=num_bytes,
        max_us=MAX_US.get((name, num_rows)),
    )


def argmax_case(num_rows: int) -> KernelCase:
    """Greedy choice."""
    num_bytes = 2 * VOCAB_SIZE
    runs = [partial(argmax, logits) for logits in random_logits(num_rows, 4.0, num_bytes)]
    return build_case("argmax", num_rows, runs, num_rows * num_bytes, ceiling=Ceiling.READ)


def adjust_case(num_rows: int, is_penalised: bool) -> KernelCase:
    """Logits to scores: logits read, with penalties the counts too, and scores written."""
    num_bytes = (2 + 4 + (5 if is_penalised else 0)) * VOCAB_SIZE
    table = filled_table(num_rows, sampling_params("none", is_penalised=is_penalised))
    slots = torch.arange(1, num_rows + 1, device="cuda")
    positions = torch.zeros_like(slots)
    runs = [
        partial(
            adjust_logits,
            logits,
            slots,
            positions,
            table.gather(slots),
            table.adjustments(),
            has_penalties=True,
            has_bias=True,
            has_min_tokens=True,
        )
        for logits in random_logits(num_rows, 4.0, 2 * VOCAB_SIZE)
    ]
    name = "adjust.penalties" if is_penalised else "adjust.plain"
    return build_case(name, num_rows, runs, num_rows * num_bytes, ceiling=Ceiling.COPY)


def draw_case(shape: str, truncation: str, num_rows: int) -> KernelCase:
    """One draw of num_rows rows from scores, each with a seed of its own."""
    num_bytes = 4 * VOCAB_SIZE
    table = filled_table(num_rows, sampling_params(truncation, is_penalised=False))
    slots = torch.arange(1, num_rows + 1, device="cuda")
    runs = []
    for position, logits in enumerate(random_logits(num_rows, SPREADS[shape], num_bytes)):
        raw = logits.float()
        scaled = (raw - raw.amax(-1, keepdim=True)) / TEMPERATURE
        runs.append(
            partial(
                draw_tokens,
                scaled,
                table.token_ids,
                torch.full_like(slots, position),
                table.gather(slots),
                has_truncation=truncation != "none",
                is_top_k_small=False,
            )
        )
    name = f"draw.{shape}.{truncation}"
    return build_case(name, num_rows, runs, num_rows * num_bytes, ceiling=Ceiling.READ)


def sample_case(shape: str, num_rows: int) -> KernelCase:
    """All that a sampled step does to its logits, with penalties, bias, min_tokens and top-p."""
    num_bytes = (2 + 4 + 5) * VOCAB_SIZE
    table = filled_table(num_rows, sampling_params("top_p", is_penalised=True))
    slots = torch.arange(1, num_rows + 1, device="cuda")
    runs = [
        partial(
            sample,
            logits,
            table,
            slots,
            torch.full_like(slots, position % 10),
            SAMPLED,
            TRITON_SAMPLE,
        )
        for position, logits in enumerate(random_logits(num_rows, SPREADS[shape], 2 * VOCAB_SIZE))
    ]
    return build_case(f"sample.{shape}", num_rows, runs, num_rows * num_bytes, ceiling=Ceiling.COPY)
