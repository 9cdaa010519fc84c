"""V6, V7: a runner accepts drafts by what its method says they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import SpecSettings, VerifyRows
from graphs.kernels.kernel_set import TORCH_SAMPLE
from spec.proposer import Proposer
from spec.runner import build_runtime
from tests.spec import third_party
from tests.spec.targets import TARGET

VOCAB = 8
NUM_ROWS = 4
# What the target likes best in each row of either request, given the rows before it.
BEST = [1, 2, 3, 4]
ANSWER = "tests.spec.third_party:AnswerProposer"
GREEDY = SamplingPlan(
    is_all_greedy=True,
    has_penalties=False,
    has_bias=False,
    has_min_tokens=False,
    has_truncation=False,
    is_top_k_small=False,
    num_top_logprobs=None,
)


def committed(settings: SpecSettings, drafts: Sequence[Sequence[int]], scale: float) -> list[int]:
    """Tokens that each request commits. Logits are 0, and `scale` for BEST; 0 means sampling."""
    table = SamplingTable(len(drafts), VOCAB, torch.device("cpu"))
    params = SamplingParams(temperature=1.0 if scale == 0.0 else 0.0)
    for slot in range(1, len(drafts) + 1):
        table.set_row(slot, params, seed=slot, eos_ids=[], prompt_token_ids=[], output_token_ids=[])
    logits = torch.nn.functional.one_hot(torch.tensor(BEST * len(drafts)), VOCAB).float() * scale
    rows = VerifyRows(
        torch.tensor([[0, *some] for some in drafts]),
        torch.arange(1, len(drafts) + 1).repeat_interleave(NUM_ROWS),
        torch.arange(NUM_ROWS).repeat(len(drafts)),
    )
    plan = replace(GREEDY, is_all_greedy=scale != 0.0)
    runner = build_runtime(settings, TARGET)
    counts: Tensor = runner.choose(logits, rows, table, plan, TORCH_SAMPLE).num_committed
    return counts.tolist()


def test_argmax_drafts_are_compared() -> None:
    """V6: without draft_probs. Oracle: the target's best tokens, by hand."""
    drafts = [[1, 2, 3], [1, 2, 5], [5, 2, 3], [1, -2, -2]]
    assert committed(SpecSettings(ANSWER, 3), drafts, 9.0) == [4, 3, 1, 2]


@pytest.mark.parametrize(("mean", "count"), [(1.0, 1), (4.0, 4)])
def test_synthetic_acceptance_replaces_the_comparison(mean: float, count: int) -> None:
    """Issue 5, `--synthetic-acceptance`: right and wrong drafts alike. Oracle: the mean asked."""
    settings = SpecSettings(ANSWER, 3, synthetic_acceptance=mean)
    assert committed(settings, [[1, 2, 3], [5, 5, 5]], 9.0) == [count, count]


def test_sampled_drafts_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """V7: with draft_probs, of more requests than the step has.

    Oracle: drafts from the target's own distribution are all accepted; compared with what the
    target samples, 1 in 8 would be.
    """
    probs = torch.full((20, 3, VOCAB), torch.nan)
    probs[:10] = 1 / VOCAB
    monkeypatch.setattr(third_party.AnswerProposer, "draft_probs", probs)
    assert committed(SpecSettings(ANSWER, 3), [[5, 6, 7]] * 10, 0.0) == [NUM_ROWS] * 10


def test_sampled_drafts_belong_to_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """V7: row i of draft_probs is the i-th request's.

    Oracle: a draft that the target says as often as others, and its method nearly never, is
    accepted; one that its method always says is accepted 1 in 8 times, here twice of sixteen
    on average.
    """
    probs = torch.empty(32, 3, VOCAB)
    probs[:16] = 1 / VOCAB
    probs[16:] = torch.nn.functional.one_hot(torch.tensor(5), VOCAB).float()
    monkeypatch.setattr(third_party.AnswerProposer, "draft_probs", probs)
    counts = committed(SpecSettings(ANSWER, 3), [[5, 5, 5]] * 32, 0.0)
    assert counts[:16] == [NUM_ROWS] * 16
    assert sum(count > 1 for count in counts[16:]) <= 5


def test_draft_probs_are_none_by_default() -> None:
    """V5: a method says nothing and drafts argmax. Oracle: the declared default."""
    assert Proposer.draft_probs is None
