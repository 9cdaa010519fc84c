"""Batches for the sampler's tests: requests in slots, sampled through their plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import MAX_TOP_LOGPROBS, SamplingParams
from engine.sampler import Sampled, SamplingPlan, plan_sampling, sample
from engine.sampling_rows import SamplingTable
from tests.oracle.sampling import Row

CPU = torch.device("cpu")
WIDEST = SamplingPlan(
    is_all_greedy=False,
    has_penalties=True,
    has_bias=True,
    has_min_tokens=True,
    has_truncation=True,
    is_top_k_small=False,
    num_top_logprobs=MAX_TOP_LOGPROBS,
)
BAREST = SamplingPlan(
    is_all_greedy=False,
    has_penalties=False,
    has_bias=False,
    has_min_tokens=False,
    has_truncation=False,
    is_top_k_small=False,
    num_top_logprobs=None,
)


def params_from(row: Row, logprobs: int | None = None) -> SamplingParams:
    fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "eos_ids"}
    return SamplingParams(**fields, max_tokens=None, logprobs=logprobs)


def build_table(
    rows: Sequence[Row], prompts: Sequence[list[int]], outputs: Sequence[list[int]], vocab: int
) -> SamplingTable:
    """Request i in slot i + 1."""
    table = SamplingTable(len(rows), vocab, CPU)
    for index, row in enumerate(rows):
        table.set_row(
            index + 1,
            params_from(row),
            seed=row.seed,
            eos_ids=row.eos_ids,
            prompt_token_ids=prompts[index],
            output_token_ids=outputs[index],
        )
    return table


def sample_rows(
    logits: Tensor,
    rows: Sequence[Row],
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    plan: SamplingPlan | None = None,
) -> Sampled:
    """One token of each request, through the plan of the batch unless one is given."""
    table = build_table(rows, prompts, outputs, logits.shape[-1])
    num_outputs = [len(output) for output in outputs]
    slots = torch.arange(1, len(rows) + 1)
    if plan is None:
        plan = plan_sampling([params_from(row) for row in rows], num_outputs)
    return sample(logits, table, slots, torch.tensor(num_outputs), plan)


def random_batch(num_rows: int, vocab: int) -> tuple[Tensor, list[Row], list[list[int]]]:
    """Rows of every kind, greedy ones among them."""
    generator = torch.Generator().manual_seed(num_rows)
    kinds = [
        Row(temperature=0.0),
        Row(temperature=0.7, top_k=20, top_p=0.95),
        Row(top_p=0.9, frequency_penalty=0.3),
        Row(temperature=1.3, min_p=0.02, logit_bias={5: 3.0}),
        Row(repetition_penalty=1.2, min_tokens=9, eos_ids=[2]),
    ]
    rows = [dataclasses.replace(kinds[i % 5], seed=i - 3) for i in range(num_rows)]
    outputs = [list(range(i % 7)) for i in range(num_rows)]
    return torch.randn(num_rows, vocab, generator=generator) * 4, rows, outputs
