"""C-E1: within the verify family, a row's logits are the same bits whatever else is drafted.

Oracle throughout: a run through the same family whose rows past the compared ones have no drafts.
(Through different families: `test_verify_contract.py`, which proves near ties.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import LLM, start
from engine.client import EngineStats
from engine.llm import CompletionOutput
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import DraftRequest, VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import TORCH_KERNELS, SampleKernels
from spec import runner
from spec.rejection import choose_argmax
from spec.stub.proposer import StubProposer
from tests.oracle.tiny_models import DENSE_CASES, MOE_CASES, TinyCase, build_oracle
from tests.spec.verify_contract import greedy_run, make_prompts, write_script

NUM_DRAFTS = 3
NUM_TOKENS = 40
# Requests of one length keep pace: every step has as many of them with drafts as without.
PROMPT_LENGTHS = (9, 9, 9)


class NoDrafts(StubProposer):
    """Every row of a step but the first is one without a draft."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]


class WrongDrafts(StubProposer):
    """All drafts are wrong, so that a step starts where one without drafts does."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        vocab = self.model.vocab_size
        return [[(draft + 1) % vocab for draft in drafts] for drafts in super().propose(requests)]


class CutDrafts(StubProposer):
    """The stub's drafts up to the one that is wrong: what is accepted is the same."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._num_steps = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        num_right = self._num_steps % (NUM_DRAFTS + 1)
        self._num_steps += 1
        return [drafts[:num_right] for drafts in super().propose(requests)]

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._num_steps = 0


@dataclass(frozen=True)
class Run:
    """What one engine said, and from which logits [slot, output token, vocab]."""

    outputs: list[CompletionOutput]
    logits: Tensor
    stats: EngineStats


@dataclass(frozen=True)
class Target:
    """A checkpoint, prompts that run together, and how to run them."""

    folder: Path
    vocab: int
    prompts: list[list[int]]
    options: dict[str, object]

    def run(self, proposer: type[StubProposer], script: Path | None = None) -> Run:
        """Greedy outputs with the drafts of one method, all from the same family."""
        settings: dict[str, object] = {
            "device": "cpu",
            "dtype": "float32",
            "compile": "off",
            "max_running_requests": len(self.prompts),
            "max_kv_tokens": 64 * len(self.prompts),
            "page_size": 8,
            "num_threads": 1,
            "speculative_algorithm": f"{proposer.__module__}:{proposer.__name__}",
            "speculative_num_steps": NUM_DRAFTS,
            "speculative_draft_model_path": None if script is None else str(script),
        }
        settings |= self.options
        shape = (1 + len(self.prompts), NUM_TOKENS + NUM_DRAFTS, self.vocab)
        table = torch.full(shape, torch.nan, device=str(settings["device"]))
        with recorded(table), LLM(str(self.folder), **settings) as llm:  # type: ignore[arg-type]
            table.fill_(torch.nan)
            outputs = greedy_run(llm, self.prompts, NUM_TOKENS)
            stats = llm.stats()
        # Slot 0 is padding, and prefill chooses the first token.
        return Run(outputs, table[1:, 1:NUM_TOKENS].cpu(), stats)


@contextmanager
def recorded(logits_table: Tensor) -> Iterator[None]:
    """Keep each row's logits by slot and output token: the last step to write one commits it."""

    def choose(
        logits: Tensor,
        rows: VerifyRows,
        table: SamplingTable,
        plan: SamplingPlan,
        kernels: SampleKernels,
    ) -> VerifyChoice:
        logits_table[rows.slots, rows.output_indexes] = logits.to(logits_table.dtype)
        return choose_argmax(logits, rows, table, plan, kernels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "choose_argmax", choose)
        yield


def by_row(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of each row of its first argument alone."""
    return lambda x, *weights: torch.cat([function(row, *weights) for row in x.split(1)])


def make_target(folder: Path, family: str, case: TinyCase, **options: object) -> Target:
    build_oracle(family, case).save_pretrained(folder)
    return Target(folder, case.vocab, make_prompts(case.vocab, PROMPT_LENGTHS), options)


def check_drafts_change_no_bit(target: Target, *, is_free_of_places: bool = False) -> None:
    """Compare runs that commit the same rows in the same steps, bit by bit.

    is_free_of_places: and runs that commit a row as another one of its step.
    """
    none = target.run(NoDrafts)
    assert len({token for output in none.outputs for token in output.token_ids}) >= 40
    assert none.stats.num_draft_tokens_total == 0 and none.logits.isfinite().all()
    script = write_script(target.folder / "script.jsonl", target.prompts, none.outputs)
    wrong = target.run(WrongDrafts, script)
    assert wrong.stats.num_draft_tokens_total > 100 and wrong.stats.num_accepted_tokens_total == 0
    assert torch.equal(wrong.logits, none.logits)
    cut, stub = target.run(CutDrafts, script), target.run(StubProposer, script)
    # Every number of drafts was accepted, by the same steps.
    assert min(stub.stats.num_accepted_per_position) > 0
    assert cut.stats.num_accepted_per_position == stub.stats.num_accepted_per_position
    assert cut.stats.num_steps_total == stub.stats.num_steps_total < none.stats.num_steps_total
    assert cut.stats.num_draft_tokens_total < stub.stats.num_draft_tokens_total
    assert torch.equal(cut.logits, stub.logits)
    if is_free_of_places:
        assert torch.equal(stub.logits, none.logits)


def test_drafts_change_no_bit_of_a_row(tmp_path: Path) -> None:
    """C-E1: the reference kernels as they are. Oracle: the runs without the other drafts."""
    check_drafts_change_no_bit(make_target(tmp_path, "qwen3_5_text", DENSE_CASES[0]))


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param("qwen3_5_text", DENSE_CASES[1], id="dense"),
        pytest.param("qwen3_5_text", DENSE_CASES[2], id="dense-tied"),
        pytest.param("qwen3_5_moe_text", MOE_CASES[0], id="moe"),
    ],
)
def test_drafts_change_no_bit_of_a_committed_token(
    family: str, case: TinyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-E1, V8: a row that follows accepted drafts, or that starts a step, gives the same.

    Products are made row by row: a matrix library's last bit depends on a row's place. So does
    that of an exponential where the heads of all rows fill no whole vectors: these targets have
    four. Oracle: the run without drafts.
    """
    kernels = replace(
        TORCH_KERNELS,
        linear=by_row(TORCH_KERNELS.linear),
        gated_linear=by_row(TORCH_KERNELS.gated_linear),
        moe_mlp=by_row(TORCH_KERNELS.moe_mlp),
    )
    monkeypatch.setattr(start, "TORCH_KERNELS", kernels)
    # One page, so that the references add up as many tokens in every step.
    target = make_target(tmp_path, family, case, page_size=64)
    check_drafts_change_no_bit(target, is_free_of_places=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "float32"}, id="fp32-graphs"),
        pytest.param({"dtype": "float32", "cuda_graphs": "off"}, id="fp32-no-graphs"),
        pytest.param({"dtype": "bfloat16"}, id="bf16-graphs"),
        pytest.param({"dtype": "bfloat16", "state_dtype": "bfloat16"}, id="bf16-states"),
    ],
)
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param("qwen3_5_text", DENSE_CASES[0], id="dense"),
        pytest.param("qwen3_5_moe_text", MOE_CASES[0], id="moe"),
    ],
)
def test_drafts_change_no_bit_on_the_gpu(
    family: str, case: TinyCase, options: dict[str, object], tmp_path: Path
) -> None:
    """C-E1: the Triton kernels, captured and not. Oracle: the runs without the other drafts.

    Rows are compared at one place of a step only: attention splits a context by its length.
    """
    check_drafts_change_no_bit(make_target(tmp_path, family, case, device="cuda", **options))
