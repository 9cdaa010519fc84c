"""V1, V3, V5: the order of a verify step, and that nothing of it is there without its flag."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.cache.pools import CachePools
from engine.client import EngineDeadError
from engine.committed_state import CommittedRows, GdnState
from engine.sampler import SamplingPlan
from engine.scheduler import Scheduler
from engine.spec_protocol import (
    DraftRequest,
    DraftSizes,
    DraftTarget,
    SpecSettings,
    VerifyOutcome,
)
from engine.verify_step import PreparedVerify, VerifyStep
from graphs.inputs import ForwardInputs
from spec.proposer import Proposer
from tests.engine.request_trace import save_checkpoint

WITHOUT_FLAG = """
import sys
from engine import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", dtype="float32", compile="off", max_kv_tokens=64) as llm:
    output = llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4))
print(output[0].outputs[0].token_ids)
sys.exit("spec" in sys.modules)
"""


class RepeatingProposer(Proposer):
    """A third party's: the pending token again."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [
            [(request.output_token_ids or request.prompt_token_ids)[-1]] * request.max_drafts
            for request in requests
        ]


def start(folder: Path, **options: object) -> LLM:
    settings: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "compile": "off",
        "max_running_requests": 2,
        "max_kv_tokens": 64,
        "num_threads": 1,
    }
    return LLM(str(folder), **(settings | options))  # type: ignore[arg-type]


def test_without_the_flag_nothing_of_it_is_imported(tmp_path: Path) -> None:
    """V1: also after serving a request. Oracle: sys.modules of a fresh interpreter."""
    save_checkpoint("qwen3_5_text", tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLAG, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


def test_the_order_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V3, V8: propose, forward, commit from device counts, drain; the forward only reads GDN state.

    Oracle: the list of V3, and the pools before and after each forward.
    """
    events: list[str] = []
    pools: list[CachePools] = []
    forward, commit = VerifyStep.forward, GdnState.commit
    propose, drain = RepeatingProposer.propose, Scheduler.drain
    finish = Proposer.finish_verify

    def noted_forward(step: VerifyStep, rows: Tensor) -> tuple[Tensor, PreparedVerify]:
        before = [tensor.clone() for tensor in (pools[0].conv, pools[0].state)] if pools else []
        scored = forward(step, rows)
        if pools:
            assert torch.equal(before[0], pools[0].conv)
            assert torch.equal(before[1], pools[0].state)
        events.append("forward")
        return scored

    def noted_commit(state: GdnState, rows: CommittedRows, plan: SamplingPlan) -> None:
        pools[:] = [state._pools]
        events.append("commit")
        before = state._pools.state.clone()
        commit(state, rows, plan)
        slots = [int(slot) for slot in rows.slots if slot]
        assert not any(torch.equal(before[:, s], state._pools.state[:, s]) for s in slots)

    def noted_propose(self: Proposer, requests: Sequence[DraftRequest]) -> list[list[int]]:
        events.append("propose")
        return propose(self, requests)  # type: ignore[arg-type]

    def noted_drain(self: Scheduler, batch: object, result: object) -> object:
        events.append("drain")
        return drain(self, batch, result)  # type: ignore[arg-type]

    def noted_finish(self: Proposer, outcomes: Sequence[VerifyOutcome]) -> None:
        events.append("finish")
        finish(self, outcomes)

    save_checkpoint("qwen3_5_text", tmp_path)
    with start(
        tmp_path,
        speculative_algorithm=f"{__name__}:{RepeatingProposer.__name__}",
        speculative_num_steps=2,
    ) as llm:
        monkeypatch.setattr(VerifyStep, "forward", noted_forward)
        monkeypatch.setattr(GdnState, "commit", noted_commit)
        monkeypatch.setattr(Scheduler, "drain", noted_drain)
        monkeypatch.setattr(RepeatingProposer, "propose", noted_propose)
        monkeypatch.setattr(RepeatingProposer, "finish_verify", noted_finish)
        llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert events[0] == "drain"  # of the prefill, whose forward is not a verify step's
    steps = events[1:]
    assert len(steps) % 5 == 0 and len(steps) > 0
    for first in range(0, len(steps), 5):
        assert steps[first : first + 5] == ["propose", "forward", "commit", "drain", "finish"]


class HookedProposer(RepeatingProposer):
    """Notes each hook; of tensors their shapes and slots."""

    wants_features = True
    notes: ClassVar[list[tuple[object, ...]]] = []

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        self.notes.append(("capture", target.device.type, sizes))

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        token_ids, positions = inputs.token_ids, inputs.positions
        assert hidden.shape == (len(token_ids), self.model.hidden_size)
        # After the norm: rows of a mean square near the norm's own.
        assert bool(hidden[slots > 0].isfinite().all())
        kept = slots > 0
        self.notes.append(("features", token_ids[kept].tolist(), positions[kept].tolist()))

    def finish_prefill(self, request: DraftRequest) -> None:
        self.notes.append(("prefill", list(request.prompt_token_ids), request.request_id))

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.notes.append(("propose", [request.request_id for request in requests]))
        return super().propose(requests)

    def finish_verify(self, outcomes: Sequence[VerifyOutcome]) -> None:
        self.notes.append(("verify", [len(outcome.token_ids) for outcome in outcomes]))

    def release(self, request_id: str) -> None:
        self.notes.append(("release", request_id))


def test_every_hook_is_called_in_its_turn(tmp_path: Path) -> None:
    """V5, V15: capture, features of prefill and verify rows, prefill, propose, verify, release.

    Oracle: the order that `Proposer` states, the tokens themselves, and the plan's pages.
    """
    save_checkpoint("qwen3_5_text", tmp_path)
    with start(
        tmp_path,
        speculative_algorithm=f"{__name__}:{HookedProposer.__name__}",
        speculative_num_steps=2,
        page_size=16,
    ) as llm:
        notes = HookedProposer.notes
        sizes = notes[0][2]
        assert notes[0][:2] == ("capture", "cpu") and isinstance(sizes, DraftSizes)
        assert tuple(sizes.batch_sizes) == (1, 2)
        # 64 tokens and the two drafts beyond them.
        assert (sizes.num_pages, sizes.page_size, sizes.num_slots) == (5, 16, 2)
        # The made-up request of the start goes the same way, and is let go and not counted.
        at_start = [note[0] for note in notes if note[0] != "features"]
        assert at_start[:3] == ["capture", "prefill", "propose"]
        assert at_start[-2:] == ["verify", "release"]
        assert llm.stats().num_drafts_total == llm.stats().num_preemptions_total == 0
        notes.clear()
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        output = llm.generate([7, 8, 9], params)[0].outputs[0].token_ids
    names = [note[0] for note in notes]
    assert names[:3] == ["features", "prefill", "propose"] and names[-1] == "release"
    assert names[2:-1] == ["propose", "features", "verify"] * (len(names[2:-1]) // 3)
    assert notes[0][1:] == ([7, 8, 9], [0, 1, 2])
    assert notes[3][1:] == ([output[0]] * 3, [3, 4, 5])  # the pending token, then its repeats
    assert sum(note[1][0] for note in notes if note[0] == "verify") == 3  # type: ignore[index]


class RaisingRelease(RepeatingProposer):
    """At fault when a request of a user's ends."""

    def release(self, request_id: str) -> None:
        if request_id != "start-up":
            raise RuntimeError("no release")


class RaisingFinish(RepeatingProposer):
    """At fault behind a user's first verify step."""

    def finish_verify(self, outcomes: Sequence[VerifyOutcome]) -> None:
        if outcomes[0].request_id != "start-up":
            raise RuntimeError("no finish")


@pytest.mark.parametrize("proposer", [RaisingRelease, RaisingFinish])
def test_a_hook_at_fault_hangs_nobody(proposer: type[Proposer], tmp_path: Path) -> None:
    """V5, S4: what a hook raises ends the engine; every caller is told, by tokens or by an error.

    Oracle: the call returns or raises EngineDeadError, and the next one raises it.
    """
    save_checkpoint("qwen3_5_text", tmp_path)
    # The step at whose drain the hook is at fault ends the requests.
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with start(
        tmp_path,
        speculative_algorithm=f"{__name__}:{proposer.__name__}",
        speculative_num_steps=1,
    ) as llm:
        with pytest.raises(EngineDeadError):
            for _ in range(2):
                llm.generate([[1, 2, 3], [4]], params)
        with pytest.raises(EngineDeadError):
            llm.generate([1], params)


def test_settings_reach_the_proposer(tmp_path: Path) -> None:
    """V5: a class of a test file, by module:Class. Oracle: what it was given."""
    seen: list[SpecSettings] = []

    class Noting(RepeatingProposer):
        def __init__(self, settings: SpecSettings, model: object) -> None:
            super().__init__(settings, model)  # type: ignore[arg-type]
            seen.append(settings)

    module = sys.modules[__name__]
    setattr(module, "Noting", Noting)  # noqa: B010
    try:
        save_checkpoint("qwen3_5_text", tmp_path)
        with start(tmp_path, speculative_algorithm=f"{__name__}:Noting") as llm:
            outputs = llm.generate([5, 6], SamplingParams(temperature=0.0, max_tokens=6))
        assert len(outputs[0].outputs[0].token_ids) == 6
        assert seen == [SpecSettings(f"{__name__}:Noting", 3)]
    finally:
        delattr(module, "Noting")
