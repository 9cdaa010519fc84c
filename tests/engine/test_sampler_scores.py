"""What the sampler reports beside tokens, and which work it plans."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from engine.request import MAX_TOP_LOGPROBS
from engine.sampler import SMALL_TOP_K, SamplingPlan, plan_sampling, score_tokens
from tests.engine.sampling_cases import WIDEST, params_from, random_batch, sample_rows
from tests.oracle.sampling import Row


def test_logprobs_are_of_the_raw_distribution() -> None:
    """E4: whatever penalties and filters do. Oracle: float64 log-softmax of the logits."""
    logits, rows, outputs = random_batch(10, 300)
    prompts = [[1]] * 10
    sampled = sample_rows(logits, rows, prompts, outputs, WIDEST)
    raw = logits.double().log_softmax(-1)
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    expected = raw.gather(1, sampled.token_ids[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs.double(), expected, atol=2e-6, rtol=0)
    top = raw.topk(MAX_TOP_LOGPROBS)
    assert torch.equal(sampled.top_ids, top.indices)
    torch.testing.assert_close(sampled.top_logprobs.double(), top.values, atol=2e-6, rtol=0)


def test_a_greedy_tokens_logprob_is_the_top_value() -> None:
    """E4: clients compare the floats. Oracle: exact equality, ties in the order of ids."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(64, 500, generator=generator) * 2).bfloat16()
    rows, empty = [Row(temperature=0.0)] * 64, [[] for _ in range(64)]
    plan = plan_sampling([params_from(rows[0], logprobs=5)], [0])
    sampled = sample_rows(logits, rows, empty, empty, plan)
    assert sampled.top_ids is not None and sampled.top_logprobs is not None
    assert torch.equal(sampled.logprobs, sampled.top_logprobs[:, 0])
    assert torch.equal(sampled.token_ids, sampled.top_ids[:, 0])
    best = logits.float().amax(-1, keepdim=True)
    assert ((logits.float() == best).sum(-1) > 1).any(), "the case must hold ties"


def test_prompt_scores_match_log_softmax() -> None:
    """E4: Oracle: float64 log-softmax; fewer tokens than asked where there are no more."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(7, 15, generator=generator) * 5
    targets = torch.randint(15, (7,), generator=generator)
    raw = logits.double().log_softmax(-1)
    scores = score_tokens(logits, targets, 0)
    assert scores.top_ids is None and scores.top_logprobs is None
    expected = raw.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs.double(), expected, atol=2e-6, rtol=0)
    scores = score_tokens(logits, targets, 20)
    assert scores.top_ids is not None and scores.top_logprobs is not None
    assert torch.equal(scores.top_ids, raw.sort(-1, descending=True).indices)
    is_target = scores.top_ids == targets[:, None]
    assert torch.equal(scores.top_logprobs[is_target], scores.logprobs)


def test_certain_tokens_keep_precise_logprobs() -> None:
    """E4: Oracle: log1p; the peak is subtracted before the sum's logarithm is."""
    logits = torch.tensor([[40.0, 26.0]])
    scores = score_tokens(logits, torch.tensor([0]), 0)
    assert scores.logprobs.item() == pytest.approx(-math.log1p(math.exp(-14.0)), rel=0.05)


@pytest.mark.parametrize(
    ("rows", "num_outputs", "changes"),
    [
        ([Row(temperature=0.0)], [0], {}),
        ([Row(temperature=1e-6, top_k=5, top_p=0.5)], [0], {}),
        ([Row(temperature=0.0), Row()], [0, 0], {"is_all_greedy": False}),
        ([Row(temperature=0.0, presence_penalty=1.0)], [0], {"has_penalties": True}),
        ([Row(temperature=0.0, logit_bias={1: 0.0})], [0], {"has_bias": True}),
        ([Row(temperature=0.0, min_tokens=2)], [1], {"has_min_tokens": True}),
        ([Row(temperature=0.0, min_tokens=2)], [2], {}),
        ([Row(min_p=0.1)], [0], {"is_all_greedy": False, "has_truncation": True}),
        (
            [Row(top_k=20), Row(temperature=0.0), Row(top_k=SMALL_TOP_K, top_p=0.5)],
            [0, 0, 0],
            {"is_all_greedy": False, "has_truncation": True, "is_top_k_small": True},
        ),
        (
            [Row(top_k=20), Row()],
            [0, 0],
            {"is_all_greedy": False, "has_truncation": True},
        ),
        (
            [Row(top_k=SMALL_TOP_K + 1)],
            [0],
            {"is_all_greedy": False, "has_truncation": True},
        ),
    ],
)
def test_plans_ask_for_what_the_batch_needs(
    rows: list[Row], num_outputs: list[int], changes: dict[str, bool]
) -> None:
    """E4: Oracle: a table of batches."""
    least = SamplingPlan(
        is_all_greedy=True,
        has_penalties=False,
        has_bias=False,
        has_min_tokens=False,
        has_truncation=False,
        is_top_k_small=False,
        num_top_logprobs=None,
    )
    plan = plan_sampling([params_from(row) for row in rows], num_outputs)
    assert plan == dataclasses.replace(least, **changes)


@pytest.mark.parametrize(
    ("asked", "planned"),
    [([None, None], None), ([None, 0], 0), ([0, 3], MAX_TOP_LOGPROBS), ([20, None], 20)],
)
def test_plans_report_enough_logprobs(asked: list[int | None], planned: int | None) -> None:
    """E4: Oracle: at least the most that any request asked for."""
    params = [params_from(Row(), logprobs=count) for count in asked]
    assert plan_sampling(params, [0, 0]).num_top_logprobs == planned
