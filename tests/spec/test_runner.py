"""V3, V5, V15: what stands between the engine and a draft method."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.memory import DraftMemory
from engine.spec_protocol import SpecRuntime, SpecSettings, VerifyOutcome, load_spec_runtime
from spec.proposer import ProposerMemory
from spec.runner import SpecRunner, build_runtime
from tests.spec import third_party
from tests.spec.targets import TARGET, request_for, settings_for

HERE = "tests.spec.third_party"
VOCAB = TARGET.vocab_size


def runner_that_answers(answer: object, monkeypatch: pytest.MonkeyPatch) -> SpecRunner:
    monkeypatch.setattr(third_party.AnswerProposer, "answer", answer)
    return build_runtime(settings_for(f"{HERE}:AnswerProposer"), TARGET)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (SpecSettings("ngram", 0), "--speculative-num-steps 0: accepted are 1 to 7"),
        (SpecSettings("ngram", 8), "--speculative-num-steps 8: accepted are 1 to 7"),
        (SpecSettings("ngram", -1), "--speculative-num-steps -1: accepted are 1 to 7"),
        (SpecSettings("nothing", 3), "--speculative-algorithm nothing: no such draft method"),
        (
            SpecSettings("stub", 3, synthetic_acceptance=0.5),
            "--synthetic-acceptance 0.5: a step commits 1 to 4 tokens with "
            "--speculative-num-steps 3",
        ),
        (SpecSettings("stub", 2, synthetic_acceptance=3.5), "--synthetic-acceptance 3.5: a step"),
        (SpecSettings("stub", 2, synthetic_acceptance=float("nan")), "--synthetic-acceptance nan"),
    ],
)
def test_a_wrong_setting_is_refused(settings: SpecSettings, message: str) -> None:
    """V1, C-L7: the flag and what is accepted. Oracle: the table."""
    with pytest.raises(ValueError) as refusal:
        build_runtime(settings, TARGET)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("num_drafts", [1, 7])
def test_the_engine_loads_the_runner_by_name(num_drafts: int) -> None:
    """V4: through the protocol alone. Oracle: what was asked for."""
    runtime: SpecRuntime = load_spec_runtime(settings_for("ngram", num_drafts), TARGET)
    assert isinstance(runtime, SpecRunner)
    assert runtime.num_drafts == num_drafts
    assert runtime.memory == DraftMemory(rows_per_request=num_drafts + 1)


def test_the_methods_bytes_reach_the_plan() -> None:
    """V15: fixed bytes and draft KV, beside the rows of k drafts. Oracle: RecordingProposer."""
    memory = build_runtime(settings_for(f"{HERE}:RecordingProposer", 5), TARGET).memory
    assert memory == DraftMemory(fixed_bytes=5000, kv_per_token=TARGET.head_dim, rows_per_request=6)


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1)])
def test_a_method_cannot_give_memory_back(sizes: tuple[int, int]) -> None:
    """V15: a negative number would add pages that do not fit. Oracle: the error."""
    with pytest.raises(ValueError, match="fewer than 0 bytes"):
        ProposerMemory(*sizes)


@pytest.mark.parametrize(
    ("drafts", "max_drafts", "usable"),
    [
        ([], 3, []),
        ([5], 3, [5]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([1, 2, 3, 4, 5], 3, [1, 2, 3]),
        ([1, 2, 3, 4, 5], 9, [1, 2, 3]),
        ([1, 2, 3], 1, [1]),
        ([1, 2, 3], 0, []),
        ([0, VOCAB - 1, VOCAB, 2], 3, [0, VOCAB - 1]),
        ([4, -1, 2], 3, [4]),
        ([-2], 3, []),
        ([np.int64(4), np.int32(6)], 3, [4, 6]),
    ],
)
def test_only_usable_drafts_reach_the_device(
    drafts: list[int], max_drafts: int, usable: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V5, C-S5: cut to max_drafts and k, and before the first id that is no token.

    Oracle: the table.
    """
    runner = runner_that_answers([drafts, [9]], monkeypatch)
    requests = [request_for([1], max_drafts=max_drafts), request_for([1], request_id="b")]
    proposed = runner.propose(requests)
    assert proposed == [usable, [9]]
    assert all(type(token_id) is int for token_id in proposed[0])


@pytest.mark.parametrize(
    ("answer", "returned"),
    [
        (None, "a NoneType for 2 requests"),
        ([[1]], "a list of 1 for 2 requests"),
        ([[1], [1], [1]], "a list of 3 for 2 requests"),
        (([1], [1]), "a tuple for 2 requests"),
        ([[1], (1,)], "a tuple as the drafts of one request"),
        ([[1], None], "a NoneType as the drafts of one request"),
        ([[1], [1.0]], "a float as a token id"),
        ([["1"], [1]], "a str as a token id"),
        ([[[1]], [1]], "a list of 1 as a token id"),
    ],
)
def test_a_proposers_mistake_names_the_proposer(
    answer: object, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V5: told before it reaches the device. Oracle: the table."""
    runner = runner_that_answers(answer, monkeypatch)
    with pytest.raises(ValueError) as mistake:
        runner.propose([request_for([1]), request_for([1], request_id="b")])
    assert str(mistake.value).startswith(
        f"--speculative-algorithm {HERE}:AnswerProposer: propose of AnswerProposer returned "
        f"{returned}; "
    )


def test_what_a_proposer_raises_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """V5: the engine sees the cause itself. Oracle: the same exception object."""
    error = RuntimeError("out of drafts")
    with pytest.raises(RuntimeError) as raised:
        runner_that_answers(error, monkeypatch).propose([request_for([1])])
    assert raised.value is error


def test_every_hook_reaches_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """V5: feature sink, post-verify, prefill, capture and release. Oracle: the calls made."""
    monkeypatch.setattr(third_party, "recorded", [])
    runner = build_runtime(settings_for(f"{HERE}:RecordingProposer"), TARGET)
    request, device = request_for([1, 2]), torch.device("cpu")
    tensors = tuple(torch.empty(2) for _ in range(4))
    outcomes = [VerifyOutcome("a", [7], [7, 8])]
    runner.capture(device, [1, 2])
    runner.take_features(*tensors)
    runner.finish_prefill(request)
    runner.propose([request])
    runner.finish_step(outcomes)
    runner.release("a")
    (proposer,) = third_party.recorded
    assert proposer.calls == [
        ("capture", device, [1, 2]),
        ("take_features", *tensors),
        ("finish_prefill", request),
        ("propose", [request]),
        ("finish_verify", outcomes),
        ("release", "a"),
    ]


@pytest.mark.parametrize("algorithm", ["stub", "ngram", f"{HERE}:SmallestProposer"])
def test_hooks_do_nothing_by_default(algorithm: str) -> None:
    """V5: a method may leave all of them out, and drafts as before. Oracle: its own drafts."""
    runner = build_runtime(settings_for(algorithm), TARGET)
    request = request_for([1, 1], [1])
    drafts: Sequence[list[int]] = runner.propose([request])
    runner.release("a")
    tensors = tuple(torch.empty(2) for _ in range(4))
    runner.capture(torch.device("cpu"), [1])
    runner.take_features(*tensors)
    runner.finish_prefill(request)
    runner.finish_step([VerifyOutcome("a", [], [1])])
    runner.release("never seen")
    assert runner.propose([request]) == drafts
    assert drafts != [[]]
