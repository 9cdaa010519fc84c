"""Verify steps with our kernels over a real vocabulary: captured, and row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.sampler import SamplingPlan, sample
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import TRITON_SAMPLE
from graphs.rows import NO_DRAFT
from spec.rejection import choose_argmax, choose_sampled, choose_synthetic
from tests.engine.sampling_cases import BAREST, WIDEST, params_from
from tests.oracle.sampling import Row

pytestmark = pytest.mark.gpu

VOCAB, NUM_ROWS = 248_320, 4
KINDS = [
    Row(temperature=0.0),
    Row(temperature=0.7, top_k=20, top_p=0.95),
    Row(temperature=0.0, frequency_penalty=1.5),
    Row(temperature=1.2, presence_penalty=0.5, frequency_penalty=0.7),
    Row(top_p=0.9, repetition_penalty=1.2),
    Row(min_tokens=2, eos_ids=[5], stop_token_ids=[7]),
    Row(min_p=0.05, logit_bias={3: 2.0}),
]
GREEDY = dataclasses.replace(BAREST, is_all_greedy=True)
Choose = Callable[[Tensor, VerifyRows, SamplingTable], VerifyChoice]


def real_step(num_requests: int) -> tuple[Tensor, VerifyRows, SamplingTable]:
    """Requests of every kind over few likely tokens, so that drafts of these are often right."""
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(num_requests)
    table = SamplingTable(num_requests, VOCAB, device)
    for index in range(num_requests):
        row = dataclasses.replace(KINDS[index % len(KINDS)], seed=index)
        table.set_row(
            index + 1,
            params_from(row),
            seed=row.seed,
            eos_ids=row.eos_ids,
            prompt_token_ids=[1, 2],
            output_token_ids=[],
        )
    logits = torch.randn(num_requests * NUM_ROWS, VOCAB, generator=generator)
    logits[:, :3] += torch.tensor([16.0, 14.5, 14.0])
    token_ids = torch.randint(-4, 3, (num_requests, NUM_ROWS), generator=generator).clamp(min=0)
    token_ids[::9, 2] = NO_DRAFT
    slots = torch.arange(1, num_requests + 1).repeat_interleave(NUM_ROWS)
    indexes = torch.arange(NUM_ROWS).repeat(num_requests)
    rows = VerifyRows(token_ids.to(device), slots.to(device), indexes.to(device))
    return logits.to(device, torch.bfloat16), rows, table


def equal_parts(one: VerifyChoice, other: VerifyChoice) -> bool:
    parts = [(*choice.sampled, choice.num_committed) for choice in (one, other)]
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(*parts, strict=True)
    )


@pytest.mark.parametrize("plan", [WIDEST, GREEDY], ids=["widest", "greedy"])
def test_verify_rows_choose_as_decode_rows_would(plan: SamplingPlan) -> None:
    """V6: 64 requests of 4 rows. Oracle: each row as a decode step, its drafts counted."""
    logits, rows, table = real_step(64)
    choice = choose_argmax(logits, rows, table, plan, TRITON_SAMPLE)
    slots = torch.arange(1, 65, device="cuda")
    tokens = choice.sampled.token_ids.view_as(rows.token_ids)
    for place in range(NUM_ROWS):
        if place > 0:
            drafts = rows.token_ids[:, place]
            table.count_tokens(torch.where(drafts < 0, 0, slots), drafts.clamp(min=0))
        here = logits.view(64, NUM_ROWS, VOCAB)[:, place]
        indexes = torch.full_like(slots, place)
        alone = sample(here, table, slots, indexes, plan, TRITON_SAMPLE)
        assert torch.equal(tokens[:, place], alone.token_ids)
    is_match = tokens[:, :-1] == rows.token_ids[:, 1:]
    assert (choice.num_committed <= 1 + is_match.long().cumprod(-1).sum(-1)).all()
    assert choice.num_committed.unique().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["argmax", "sampled", "synthetic"])
def test_captured_steps_choose_the_same(method: str) -> None:
    """Issue 5, items 1 and 3: replays over new inputs. Oracle: the same functions, not captured."""
    logits, rows, table = real_step(16)
    probs = logits.view(16, NUM_ROWS, VOCAB)[:, :-1].float().softmax(-1)
    choices: dict[str, Choose] = {
        "argmax": lambda x, r, t: choose_argmax(x, r, t, WIDEST, TRITON_SAMPLE),
        "sampled": lambda x, r, t: choose_sampled(x, r, t, WIDEST, TRITON_SAMPLE, probs),
        "synthetic": lambda x, r, t: choose_synthetic(x, r, t, WIDEST, TRITON_SAMPLE, 2.5),
    }
    choose = choices[method]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        choose(logits, rows, table)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = choose(logits, rows, table)
    seen = set()
    for shift in range(3):
        logits.copy_(logits.roll(1, 0))
        rows.token_ids.copy_((rows.token_ids + shift).clamp(max=2))
        graph.replay()
        expected = choose(logits, rows, table)
        assert equal_parts(captured, expected)
        seen |= set(expected.num_committed.tolist())
    assert len(seen) > 1
