"""V3, V5, V15: what stands between the engine and a draft method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from engine.memory import DraftMemory
from engine.spec_protocol import (
    DraftSizes,
    SpecRuntime,
    SpecSettings,
    VerifyOutcome,
    load_spec_runtime,
)
from spec.proposer import ProposerMemory
from spec.runner import SpecRunner, build_runtime
from tests.spec import third_party
from tests.spec.targets import TARGET, request_for, settings_for

HERE = "tests.spec.third_party"
SIZES = DraftSizes(batch_sizes=(1, 2), num_pages=5, page_size=16, num_slots=2)
VOCAB = TARGET.vocab_size
SHORTEST, LONGEST = (f"--speculative-ngram-{end}-match-window-size" for end in ("min", "max"))


def runner_that_answers(answer: object, monkeypatch: pytest.MonkeyPatch) -> SpecRunner:
    monkeypatch.setattr(third_party.AnswerProposer, "answer", answer)
    return build_runtime(settings_for(f"{HERE}:AnswerProposer"), TARGET)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 3), "--speculative-algorithm must be the name of a draft method, got ''"),
        (("ngram", 0), "--speculative-num-steps must be in [1, 7], got 0"),
        (("ngram", 8), "--speculative-num-steps must be in [1, 7], got 8"),
        (("ngram", -1), "--speculative-num-steps must be in [1, 7], got -1"),
        (("ngram", 2.0), "--speculative-num-steps must be in [1, 7], got 2.0"),
        (("nothing", 3), "--speculative-algorithm nothing: no such draft method"),
        (
            ("stub", 3, None, 0.5),
            "--synthetic-acceptance must be in [1, 4] with --speculative-num-steps 3, got 0.5",
        ),
        (("stub", 2, None, 3.5), "--synthetic-acceptance must be in [1, 3] with"),
        (("stub", 2, None, float("nan")), "--synthetic-acceptance must be in [1, 3] with"),
        (("ngram", 3, None, None, 0, 8), f"{SHORTEST} must be in [1, 8] with {LONGEST} 8, got 0"),
        (("ngram", 3, None, None, 9, 8), f"{SHORTEST} must be in [1, 8] with {LONGEST} 8, got 9"),
        (("ngram", 3, None, None, True, 8), f"{SHORTEST} must be in [1, 8] with"),
        (("ngram", 3, None, None, 1, 65), f"{LONGEST} must be in [1, 64], got 65"),
        (("ngram", 3, None, None, 1, 0), f"{LONGEST} must be in [1, 64], got 0"),
    ],
)
def test_a_wrong_setting_is_refused(fields: tuple[Any, ...], message: str) -> None:
    """V1, C-L7: the flag and what is accepted, whoever asks for it. Oracle: the table."""
    with pytest.raises(ValueError) as refusal:
        build_runtime(SpecSettings(*fields), TARGET)
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


@pytest.mark.parametrize(
    ("answer", "returned"),
    [
        (ProposerMemory(-1, 0), "ProposerMemory(fixed_bytes=-1, kv_per_token=0, "),
        (ProposerMemory(0, -1), "ProposerMemory(fixed_bytes=0, kv_per_token=-1, "),
        (ProposerMemory(float("nan")), "ProposerMemory(fixed_bytes=nan, kv_per_token=0, "),  # type: ignore[arg-type]
        (ProposerMemory(2.0), "ProposerMemory(fixed_bytes=2.0, kv_per_token=0, "),  # type: ignore[arg-type]
        (ProposerMemory(0, None), "ProposerMemory(fixed_bytes=0, kv_per_token=None, "),  # type: ignore[arg-type]
        (ProposerMemory(True), "ProposerMemory(fixed_bytes=True, kv_per_token=0, "),
        (None, "a NoneType"),
        ((1, 2), "a tuple"),
        ([1, 2], "a list of 2"),
    ],
)
def test_what_is_no_memory_is_refused(
    answer: object, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V15: it would change how many pages fit. Names the proposer. Oracle: the table."""
    monkeypatch.setattr(third_party.MemoryProposer, "answer", answer)
    algorithm = f"{HERE}:MemoryProposer"
    with pytest.raises(ValueError) as refusal:
        build_runtime(settings_for(algorithm), TARGET)
    message = str(refusal.value)
    assert message.startswith(
        f"--speculative-algorithm {algorithm}: memory of MemoryProposer returned {returned}"
    )
    assert message.endswith("; it must return a ProposerMemory of whole numbers, 0 or more")


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
    request, target, rows, inputs, choice = request_for([1, 2]), *(mock.Mock() for _ in range(4))
    hidden, slots = torch.empty(2), torch.empty(2)
    outcomes = [VerifyOutcome("a", [7], [7, 8])]
    runner.capture(target, SIZES)
    assert runner.draft(rows) is third_party.DRAFTS
    runner.take_features(hidden, inputs, slots)
    runner.take_choice(slots, choice)
    runner.finish_prefill(request)
    runner.propose([request])
    runner.finish_step(outcomes)
    runner.release("a")
    (proposer,) = third_party.recorded
    assert proposer.calls == [
        ("capture", target, SIZES),
        ("draft", rows),
        ("take_features", hidden, inputs, slots),
        ("take_choice", slots, choice),
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
    runner.capture(mock.Mock(), SIZES)
    runner.take_features(torch.empty(2), mock.Mock(), torch.empty(2))
    runner.take_choice(torch.empty(2), mock.Mock())
    runner.finish_prefill(request)
    runner.finish_step([VerifyOutcome("a", [], [1])])
    runner.release("never seen")
    assert runner.propose([request]) == drafts
    assert drafts != [[]]
