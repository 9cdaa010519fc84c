"""E4, E5: one trace of mixed requests with steps in flight and without, on the CPU and on CUDA.

On the CPU fewer requests run, uncompiled: the schedule is the same, the graphs are not there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton import knobs

from engine import LLM
from engine.client import EngineStats
from engine.llm import RequestOutput
from graphs.capture import CapturedGraph
from tests.engine.request_trace import (
    EOS_IDS,
    NUM_OUTPUT,
    TracedRequest,
    expected_end,
    list_outcomes,
    run_requests,
    save_checkpoint,
    stopped_requests,
    unstopped_requests,
)
from tests.tolerances import LOGITS_FP32

MAX_GROWTH_PER_REQUEST = 10 * 2**10
NUM_WARM_UP = 40
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Setting:
    """Where the trace runs. `num_requests`: prompts in it, some with two choices."""

    device: str
    compile: str
    family: str
    num_requests: int

    def start(self, folder: Path, overlap: str) -> LLM:
        """An engine that lacks pages now and then and splits prompts over prefills."""
        return LLM(
            str(folder),
            device=self.device,
            dtype="float32",
            compile=self.compile,
            compile_cache=str(folder / "compiled"),
            overlap=overlap,
            max_running_requests=8,
            max_kv_tokens=256,
            max_prefill_tokens=48,
            page_size=16,
            check_integrity="on",
            seed=1,
        )


SETTINGS = [
    pytest.param(Setting("cpu", "off", "qwen3_5_text", 120), id="cpu"),
    *(
        pytest.param(
            Setting("cuda", compile_blocks, family, 500),
            id=f"cuda-{family}-compile-{compile_blocks}",
            marks=pytest.mark.gpu,
        )
        for compile_blocks, family in (
            ("off", "qwen3_5_text"),
            ("off", "qwen3_5_moe"),
            ("on", "qwen3_5_text"),
        )
    ),
]


@dataclass(frozen=True)
class Run:
    """What a trace came to; counters and bytes are of the trace alone, without the warm-up."""

    outputs: list[RequestOutput]
    num_prompt_tokens: int
    num_output_tokens: int
    num_recompilations: int
    num_captures: int
    num_preemptions: int
    grown_bytes: int


class CountedCaptures:
    """Counts the graphs that anything captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        monkeypatch.setattr("graphs.family.CapturedGraph", self._capture)

    def _capture(
        self,
        run: object,
        inputs: Sequence[Tensor],
        bound: Sequence[Tensor],
        pool: tuple[int, int],
    ) -> CapturedGraph[object]:
        self.num += 1
        return CapturedGraph(run, inputs, bound, pool)  # type: ignore[arg-type]


def wait_idle(llm: LLM) -> EngineStats:
    """The counters once nothing runs: a last step may be in flight after the last update."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while (stats := llm.stats()).num_slots_used or stats.num_pages_used:
        assert time.monotonic() < deadline, "slots or pages were not returned"
        time.sleep(0.005)
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    return stats


def allocated_bytes(device: str) -> int:
    """Bytes of live tensors on a GPU; 0 on the CPU."""
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def run_trace(
    llm: LLM, requests: Sequence[TracedRequest], device: str, captures: CountedCaptures
) -> Run:
    """A warm-up lot, then all requests; recompiling raises in either."""
    with torch.compiler.set_stance("fail_on_recompile"):
        run_requests(llm, requests[:NUM_WARM_UP])
        before, num_captures = wait_idle(llm), captures.num
        bytes_before = allocated_bytes(device)
        outputs = run_requests(llm, requests)
    after = wait_idle(llm)
    return Run(
        outputs=outputs,
        num_prompt_tokens=after.prompt_tokens_total - before.prompt_tokens_total,
        num_output_tokens=after.generation_tokens_total - before.generation_tokens_total,
        num_recompilations=after.num_recompilations_total,
        num_captures=captures.num - num_captures,
        num_preemptions=after.num_preemptions_total,
        grown_bytes=allocated_bytes(device) - bytes_before,
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_overlap_changes_no_token_usage_or_finish(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4, E5: every way to choose tokens and to end, at every position; nothing is left behind.

    Oracles: the run without overlap; for the ends, the tokens of the same requests unstopped,
    cut by hand; for what is left behind, the engine's counters and the allocator's.
    """
    captures = CountedCaptures(monkeypatch)
    vocab = save_checkpoint(setting.family, tmp_path)
    unstopped = unstopped_requests(setting.num_requests, vocab)
    with setting.start(tmp_path, "off") as llm:
        free = run_requests(llm, unstopped)
        requests = stopped_requests(unstopped, free)
        plain = run_trace(llm, requests, setting.device, captures)
    with setting.start(tmp_path, "on") as llm:
        overlapped = run_trace(llm, requests, setting.device, captures)
    assert list_outcomes(overlapped.outputs) == list_outcomes(plain.outputs)
    check_logprobs(overlapped.outputs, plain.outputs)
    check_ends(requests, free, overlapped.outputs)
    assert (captures.num > 0) == (setting.device == "cuda")
    for run in (plain, overlapped):
        check_leavings(run, requests)


@pytest.mark.gpu
def test_no_kernel_is_compiled_after_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: Triton compiles a kernel anew for other argument types and divisibilities too.

    Oracle: Triton's own hook behind each compilation. Prefills of many sizes, in pieces, scored
    and not. Kernels that earlier tests of this process compiled are not seen: run it alone.
    """
    compiled: list[str] = []

    def note(
        *,
        key: str,
        repr: str,
        fn: object,
        compile: object,
        is_manual_warmup: bool,
        already_compiled: bool,
    ) -> None:
        compiled.append(repr)

    vocab = save_checkpoint("qwen3_5_text", tmp_path)
    with Setting("cuda", "off", "qwen3_5_text", 0).start(tmp_path, "on") as llm:
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        run_requests(llm, unstopped_requests(120, vocab))
    assert compiled == []


def check_ends(
    requests: Sequence[TracedRequest],
    free: Sequence[RequestOutput],
    outputs: Sequence[RequestOutput],
) -> None:
    """Each end is that of the unstopped tokens, cut; stops occur at every position."""
    stops: dict[str, set[int]] = {"stop id": set(), "stop string": set(), "eos": set()}
    for request, unstopped, output in zip(requests, free, outputs, strict=True):
        end = output.outputs[0]
        if request.ending == "min tokens":
            assert len(end.token_ids) > request.params.min_tokens
            masked = {*EOS_IDS, *request.params.stop_token_ids}
            assert not masked & set(end.token_ids[: request.params.min_tokens])
            continue
        expected = expected_end(request.params, unstopped.outputs[0].token_ids)
        assert (end.token_ids, end.finish_reason, end.stop_reason) == expected
        if request.ending in stops and end.finish_reason == "stop":
            stops[request.ending].add(len(end.token_ids))
    # With the last token a request ends anyway.
    positions = set(range(1, NUM_OUTPUT))
    assert positions <= stops["stop id"] and positions <= stops["stop string"]
    assert len(stops["eos"]) >= NUM_OUTPUT // 3


def check_logprobs(got: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Equal up to rounding: batches of other sizes have other sums."""
    for left, right in zip(got, expected, strict=True):
        for one, other in zip(left.outputs, right.outputs, strict=True):
            for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert a.token_id == b.token_id
                assert abs(a.logprob - b.logprob) < LOGITS_FP32
                assert len(a.top) == len(b.top)


def check_leavings(run: Run, requests: Sequence[TracedRequest]) -> None:
    """Usage adds up; nothing was compiled or captured, and the device's memory did not grow."""
    outcomes = list_outcomes(run.outputs)
    assert run.num_prompt_tokens == sum(outcome.num_prompt for outcome in outcomes)
    assert run.num_output_tokens == sum(len(outcome.token_ids) for outcome in outcomes)
    assert len(outcomes) == sum(request.params.n for request in requests)
    assert run.num_recompilations == run.num_captures == 0
    assert run.num_preemptions > 0, "the trace should also lack pages"
    assert run.grown_bytes < MAX_GROWTH_PER_REQUEST * len(requests)
