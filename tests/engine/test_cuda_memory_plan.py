"""V15: the most that a plan allows runs right after ready, and stays within the plan.

The same body runs on the CPU, where a dispatch mode counts the bytes of live tensors in place of
CUDA's allocator.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.client import EngineStats
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local_client import LocalClient
from engine.memory import MemoryPlan
from engine.plan import Plan
from engine.request import FinishReason, NewRequest, SamplingParams
from engine.start import start_engine
from engine.step_set import prepare_thread
from tests.engine.live_bytes import LiveBytes

GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
NUM_LAYERS = 4
# Longer than the prefills of all prompts take, so that all requests come to run together.
NUM_OUTPUT = 32
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.95,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    min_tokens=2,
    logit_bias={3: 1.0},
    logprobs=20,
    max_tokens=NUM_OUTPUT,
    ignore_eos=True,
    seed=1,
)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class PlanCase:
    """The first layers of a geometry with `changes`, and how much of it may run at once."""

    device: str
    geometry: str
    changes: dict[str, int]
    num_requests: int
    prompt_len: int
    max_prefill_tokens: int
    prompt_logprobs: int | None = None
    compile: str = "off"

    @property
    def config(self) -> EngineConfig:
        """The options, but for the folder: all requests fit at once, to the last token."""
        max_model_len = self.prompt_len + NUM_OUTPUT
        return EngineConfig(
            load_format="dummy",
            device=self.device,
            dtype="bfloat16" if self.device == "cuda" else "float32",
            compile=self.compile,
            max_model_len=max_model_len,
            max_kv_tokens=self.num_requests * -(-max_model_len // 64) * 64,
            max_running_requests=self.num_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            seed=0,
        )

    def save(self, folder: Path) -> None:
        """Its config.json."""
        fields = json.loads((GEOMETRIES / self.geometry / "config.json").read_text())
        text = fields["text_config"]
        text |= {"num_hidden_layers": NUM_LAYERS, "layer_types": text["layer_types"][:NUM_LAYERS]}
        (folder / "config.json").write_text(
            json.dumps(fields | {"text_config": text | self.changes})
        )


DENSE, MOE = "Qwen3.5-4B", "Qwen3.6-35B-A3B"
ON_CPU = PlanCase("cpu", DENSE, TINY, 6, 200, 256)
ON_CUDA = PlanCase("cuda", DENSE, {}, 64, 992, 8192)
CASES = [
    pytest.param(ON_CPU, id="cpu"),
    pytest.param(replace(ON_CPU, prompt_logprobs=20), id="cpu-scored"),
    *(
        pytest.param(case, id=name, marks=pytest.mark.gpu)
        for name, case in (
            ("dense", ON_CUDA),
            ("dense-compiled", replace(ON_CUDA, compile="on")),
            ("dense-scored", replace(ON_CUDA, prompt_logprobs=20)),
            ("dense-long", replace(ON_CUDA, num_requests=4, prompt_len=16_352)),
            ("moe", replace(ON_CUDA, geometry=MOE, num_requests=16)),
        )
    ),
]


@dataclass(frozen=True)
class Peak:
    """The most bytes at once since before the start: of live tensors, and held for them."""

    allocated: int
    reserved: int


class CudaPeak:
    """Since construction, by CUDA's allocator: graphs' pools are in both numbers."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = Peak(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())

    def read(self) -> Peak:
        """The most since then, less what was there."""
        return Peak(
            torch.cuda.max_memory_allocated() - self._before.allocated,
            torch.cuda.max_memory_reserved() - self._before.reserved,
        )


class CpuPeak:
    """Since construction: what the start makes on this thread, and the launch thread's most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here, self._launching = LiveBytes(), LiveBytes()
        self._here.__enter__()
        monkeypatch.setattr("engine.start.prepare_thread", self._prepare_thread)

    def _prepare_thread(self, plan: Plan) -> None:
        prepare_thread(plan)
        self._launching.__enter__()

    def stop(self) -> None:
        """Count nothing more on this thread."""
        self._here.__exit__(None, None, None)

    def read(self) -> Peak:
        """Loading is over when steps run: of this thread, what is left counts."""
        total = self._here.now + self._launching.peak
        return Peak(total, total)


@pytest.fixture(autouse=True)
def freed_memory() -> Iterator[None]:
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


async def run_all(engine: Engine, requests: list[NewRequest]) -> EngineStats:
    """Run them together; the counters at the moment when most pages were in use."""
    client = LocalClient(engine)
    most = await client.stats()

    async def run(request: NewRequest) -> None:
        nonlocal most
        async for update in client.generate(request):
            assert update.error is None
            stats = await client.stats()
            most = max(most, stats, key=lambda seen: seen.num_pages_used)
        assert update.finish_reason is FinishReason.LENGTH

    try:
        await asyncio.gather(*map(run, requests))
    finally:
        await client.close()
    return most


def check_within(peak: Peak, memory: MemoryPlan) -> None:
    """Tensors stay within the parts that were planned for them, the allocator within all."""
    assert peak.allocated <= memory.used_bytes - memory.fixed.reserve
    assert peak.reserved <= memory.used_bytes <= memory.budget_bytes


def start_counted(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Callable[[], Peak]]:
    """A ready engine, and how to read the peak since before its start."""
    if config.device == "cuda":
        peak = CudaPeak()
        return start_engine(config, has_progress=False), peak.read
    counter = CpuPeak(monkeypatch)
    try:
        return start_engine(config, has_progress=False), counter.read
    finally:
        counter.stop()


@pytest.mark.parametrize("case", CASES)
async def test_the_largest_allowed_load_stays_within_the_plan(
    case: PlanCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V15: the longest prompts times the running requests, every sampling option in use.

    Oracle: the allocator's peak (on the CPU the live bytes), against the sums of the plan.
    """
    case.save(tmp_path)
    engine, read_peak = start_counted(replace(case.config, model_path=str(tmp_path)), monkeypatch)
    memory = engine.info.memory
    assert memory is not None
    prompts = torch.randint(TINY["vocab_size"], (case.num_requests, case.prompt_len)).tolist()
    params = msgspec.structs.replace(EVERYTHING, prompt_logprobs=case.prompt_logprobs)
    requests = [
        NewRequest(request_id=str(index), prompt_token_ids=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]
    most = await run_all(engine, requests)
    assert most.num_requests_running == case.num_requests == memory.num_slots
    assert most.num_pages_used == memory.num_pages
    check_within(read_peak(), memory)
