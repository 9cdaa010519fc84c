"""V2, V12, V13: greedy outputs with drafts are those without, whatever is accepted.

Oracle throughout: a plain greedy run of the same checkpoint without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from engine import LLM
from engine.llm import CompletionOutput
from engine.spec_protocol import DraftRequest
from spec.proposer import Proposer
from tests.engine.request_trace import save_checkpoint
from tests.spec.verify_contract import (
    Comparison,
    compare,
    greedy_run,
    make_prompts,
    penalised_run,
    write_script,
)

FAMILIES = ("qwen3_5", "qwen3_5_moe")
# k - 1 to k + 2 for k = 3 among them: the shapes of verify steps.
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 19, 33)
NUM_TOKENS = 48
MAX_NEAR_TIES = 1 / 1000


@dataclass(frozen=True)
class Reference:
    """A checkpoint, prompts, and what plain decoding makes of them."""

    folder: Path
    prompts: list[list[int]]
    greedy: list[CompletionOutput]
    penalised: list[list[int]]
    script: Path


def start(folder: Path, **options: object) -> LLM:
    """An engine that lacks pages now and then and splits prompts over prefills."""
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "compile": "off",
        "compile_cache": str(folder / "compiled"),
        "max_running_requests": 4,
        "max_kv_tokens": 224,
        "max_prefill_tokens": 24,
        "page_size": 8,
        "num_threads": 1,
    }
    return LLM(str(folder), **(settings | options))  # type: ignore[arg-type]


def make_reference(folder: Path, family: str, **options: object) -> Reference:
    vocab = save_checkpoint(family, folder)
    prompts = make_prompts(vocab, PROMPT_LENGTHS)
    with start(folder, **options) as llm:
        greedy = greedy_run(llm, prompts, NUM_TOKENS)
        penalised = penalised_run(llm, prompts, NUM_TOKENS)
        assert llm.stats().num_drafts_total == 0
    script = write_script(folder / "script.jsonl", prompts, greedy)
    return Reference(folder, prompts, greedy, penalised, script)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """A dense and an MoE checkpoint."""
    yield make_reference(tmp_path_factory.mktemp("model"), request.param)


def run_contract(reference: Reference, num_drafts: int, **options: object) -> Comparison:
    """Compare a run with `stub`, of whose drafts one at a moving place is wrong."""
    with start(
        reference.folder,
        speculative_algorithm="stub",
        speculative_num_steps=num_drafts,
        speculative_draft_model_path=str(reference.script),
        **options,
    ) as llm:
        result = compare(llm, reference.prompts, reference.greedy)
        stats = llm.stats()
        if options.get("dtype", "float32") == "float32":  # counts are exact, and so is the rest
            assert penalised_run(llm, reference.prompts, NUM_TOKENS) == reference.penalised
    per_position = stats.num_accepted_per_position
    # Every accept count from 0 to k has occurred: each position was accepted, and fewer.
    assert len(per_position) == num_drafts
    accepted = [stats.num_drafts_total, *per_position, 0]
    assert all(more > fewer for more, fewer in pairwise(accepted))
    assert stats.num_pages_used == stats.num_slots_used == 0
    return result


class RandomProposer(Proposer):
    """Drafts that know nothing."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        random = Random(len(requests) + sum(len(r.output_token_ids) for r in requests))
        vocab = self.model.vocab_size
        return [[random.randrange(vocab) for _ in range(r.max_drafts)] for r in requests]


def test_random_drafts_leave_no_trace(reference: Reference) -> None:
    """C-S12: accepted about once in a vocabulary; what was rejected is never visible."""
    algorithm = f"{__name__}:{RandomProposer.__name__}"
    with start(reference.folder, speculative_algorithm=algorithm) as llm:
        result = compare(llm, reference.prompts, reference.greedy)
        stats = llm.stats()
    assert result.num_near_ties <= MAX_NEAR_TIES * result.num_tokens
    # The first draft of a step is right once in 97.
    assert stats.num_accepted_per_position[0] <= stats.num_drafts_total / 97 * 3
    assert stats.num_drafts_total > 300


@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_drafts_change_no_token(reference: Reference, num_drafts: int) -> None:
    """V13: dense and MoE targets, k from 1 to 7, fp32."""
    result = run_contract(reference, num_drafts)
    assert result.num_near_ties <= MAX_NEAR_TIES * result.num_tokens


@pytest.mark.e2e
@pytest.mark.parametrize("reference", FAMILIES[:1], indirect=True)
def test_drafts_change_no_token_of_compiled_steps(reference: Reference) -> None:
    """V12, V13: the verify family compiled; the greedy run is the uncompiled one."""
    result = run_contract(reference, 1, compile="on", max_running_requests=2)
    assert result.num_near_ties <= MAX_NEAR_TIES * result.num_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "float32"}, id="fp32-graphs"),
        pytest.param({"dtype": "float32", "cuda_graphs": "off"}, id="fp32-no-graphs"),
        pytest.param(
            {"dtype": "float32", "cuda_graphs": "off", "attention_backend": "torch"},
            id="fp32-torch",
        ),
        pytest.param({"dtype": "bfloat16"}, id="bf16-graphs"),
        pytest.param({"dtype": "bfloat16", "state_dtype": "bfloat16"}, id="bf16-states"),
        pytest.param({"dtype": "float32", "compile": "on"}, id="fp32-compiled"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token_on_the_gpu(
    family: str, options: dict[str, object], num_drafts: int, tmp_path: Path
) -> None:
    """V12, V13: every attention backend, graphs on and off, fp32 and bf16."""
    if options.get("compile") == "on" and num_drafts != 3:
        pytest.skip("compiled once")
    reference = make_reference(tmp_path, family, device="cuda", **options)
    result = run_contract(reference, num_drafts, device="cuda", **options)
    if options["dtype"] == "float32":
        assert result.num_near_ties <= MAX_NEAR_TIES * result.num_tokens
