"""V6, E4: mixed requests with drafts end as they do without, at every position of a run.

Sampled requests too: drafts are a function of the tokens before them, so seeded tokens do not
depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import LLM
from engine.llm import RequestOutput
from tests.engine.request_trace import (
    TracedRequest,
    list_outcomes,
    run_requests,
    save_checkpoint,
    stopped_requests,
    unstopped_requests,
)
from tests.tolerances import LOGITS_FP32

NUM_REQUESTS = 75


def start(folder: Path, **options: object) -> LLM:
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "compile": "off",
        "max_running_requests": 8,
        "max_kv_tokens": 128,
        "max_prefill_tokens": 48,
        "page_size": 16,
        "num_threads": 1,
        "check_integrity": "on",
        "seed": 1,
    }
    return LLM(str(folder), **(settings | options))  # type: ignore[arg-type]


def write_script(
    file: Path, requests: Sequence[TracedRequest], outputs: Sequence[RequestOutput]
) -> Path:
    """The first choice of each prompt; a prompt that comes twice is drafted once."""
    lines = {}
    for request, output in zip(requests, outputs, strict=True):
        ids = output.outputs[0].token_ids
        lines.setdefault(
            tuple(request.prompt),
            f'{{"prompt_token_ids": {request.prompt}, "output_token_ids": {ids}}}',
        )
    file.write_text("\n".join(lines.values()))
    return file


@pytest.mark.parametrize(("algorithm", "num_drafts"), [("stub", 3), ("ngram", 4)])
def test_drafts_change_no_token_usage_or_finish(
    algorithm: str, num_drafts: int, tmp_path: Path
) -> None:
    """V6, C-P1, C-E3, C-E6: every way to choose tokens and to end, n = 2, prompt scores.

    Oracle: the run without drafts of the same requests and seeds.
    """
    vocab = save_checkpoint("qwen3_5_text", tmp_path)
    unstopped = unstopped_requests(NUM_REQUESTS, vocab)
    with start(tmp_path) as llm:
        free = run_requests(llm, unstopped)
        requests = stopped_requests(unstopped, free)
        plain = run_requests(llm, requests)
    script = write_script(tmp_path / "script.jsonl", unstopped, free)
    with start(
        tmp_path,
        speculative_algorithm=algorithm,
        speculative_num_steps=num_drafts,
        speculative_draft_model_path=str(script) if algorithm == "stub" else None,
    ) as llm:
        drafted = run_requests(llm, requests)
        stats = llm.stats()
    assert list_outcomes(drafted) == list_outcomes(plain)
    check_scores(drafted, plain)
    if algorithm == "stub":  # right until a place that moves: something is accepted everywhere
        assert len(stats.num_accepted_per_position) == num_drafts
        assert min(stats.num_accepted_per_position) > 0
    assert stats.num_draft_tokens_total > 0
    assert stats.num_accepted_tokens_total < stats.num_draft_tokens_total
    assert stats.num_preemptions_total > 0
    assert stats.num_pages_used == stats.num_slots_used == 0


def check_scores(got: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Log-probabilities of the same tokens, by the rows that chose them."""
    for left, right in zip(got, expected, strict=True):
        for choice, other in zip(left.outputs, right.outputs, strict=True):
            for entry, reference in zip(choice.logprobs or (), other.logprobs or (), strict=True):
                assert entry.token_id == reference.token_id
                assert entry.logprob == pytest.approx(reference.logprob, abs=LOGITS_FP32)
