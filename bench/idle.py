"""How much of a real `LLM.generate` the GPU spends between steps, with made-up weights.

    python -m bench.idle [--geometry NAMES] [--batch SIZES] [--context N] [--tokens N]
        [--results FILE]

For each geometry and batch size, three things. The wall time of a decode step: two calls differ
only in their number of tokens, so the difference is whole steps. Beside it the time of the same
step launched again and again, as `bench.step` does it, on the same engine, sequences and graph:
what the wall time has beyond it is the idle share that counts. And from a trace of some thirty
steps in the midst of a call, the shares without any kernel and between steps; tracing slows the
host, so these are upper bounds. On the CPU (`--device cpu`, to try it out) there is no trace.
Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import torch

from bench.device_trace import IdleShares, idle_shares, recording
from bench.step import time_steps
from bench.step_model import GEOMETRIES
from engine import LLM, SamplingParams
from engine.sampler import SamplingPlan
from engine.token_step import Chosen
from graphs.family import GraphFamily
from graphs.rows import Row
from server.bench.results import METRIC_UNITS, ResultRow, write_results

NUM_REPEATS = 3
NUM_TRACED_STEPS = 30
# A trace takes a while to begin, and the call must not end before.
TRACED_TOKENS = 640
POLL_S = 0.0005
TRACE_TIMEOUT_S = 300.0
# The largest share that is fine, at batch 1 and beyond.
BAR_ALONE, BAR_TOGETHER = 0.02, 0.05


def read_flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="idle time between decode steps")
    parser.add_argument("--geometry", default="Qwen3.6-27B,Qwen3.6-35B-A3B")
    parser.add_argument("--batch", default="1,64", help="prompts of a call")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of the longer call")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--compile", default="auto", help="as of the server")
    parser.add_argument("--overlap", default="auto", help="as of the server")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--results", type=Path, help="default: only print")
    return parser.parse_args()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: of a call's wall time, and launched behind one another."""

    wall_s: float
    replay_s: float

    @property
    def idle_share(self) -> float:
        """Of the wall time, what no step needed; rounding may make it negative, it is 0 then."""
        return max(1 - self.replay_s / self.wall_s, 0.0)


class StepRecorder:
    """Notes the decode steps that an engine in this process runs, to run one of them again."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.rows: Sequence[Row] = ()
        self._again: Callable[[], Chosen] | None = None
        self._run = GraphFamily.run

    def patch(self) -> mock._patch[Callable[..., Chosen]]:
        """While entered, every family's steps are noted."""
        return mock.patch.object(GraphFamily, "run", self._noted_run())

    def forget(self) -> None:
        """Begin anew."""
        self.num_steps, self.rows, self._again = 0, (), None

    def run_again(self) -> Chosen:
        """The last step of the most rows; for when the engine is idle."""
        assert self._again is not None, "no step was noted"
        return self._again()

    def _noted_run(self) -> Callable[..., Chosen]:
        recorder, run = self, self._run

        def noted_run(
            family: GraphFamily[SamplingPlan, Chosen], rows: Sequence[Row], plan: SamplingPlan
        ) -> Chosen:
            recorder.num_steps += 1
            if len(rows) >= len(recorder.rows):
                recorder.rows = rows
                recorder._again = lambda: run(family, rows, plan)
            return run(family, rows, plan)

        return noted_run


def main() -> None:
    """Measure, print, write results."""
    flags = read_flags()
    rows: list[ResultRow] = []
    batches = [int(size) for size in flags.batch.split(",")]
    for geometry in flags.geometry.split(","):
        recorder = StepRecorder()
        with recorder.patch(), start_llm(geometry, max(batches), flags) as llm:
            for batch in batches:
                rows += measure(geometry, llm, recorder, batch, flags)
        del llm, recorder
        gc.collect()
        if flags.device == "cuda":
            torch.cuda.empty_cache()
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device=flags.device)


def start_llm(geometry: str, max_requests: int, flags: argparse.Namespace) -> LLM:
    """An engine with made-up weights that holds all requests to their last token."""
    num_tokens = flags.context + longest_output(flags)
    return LLM(
        str(GEOMETRIES / geometry),
        load_format="dummy",
        device=flags.device,
        dtype="bfloat16",
        compile=flags.compile,
        overlap=flags.overlap,
        max_running_requests=max_requests,
        max_model_len=num_tokens,
        max_kv_tokens=max_requests * (-(-num_tokens // 64) * 64),
    )


def longest_output(flags: argparse.Namespace) -> int:
    """Output tokens of the longest call."""
    return max(flags.tokens, TRACED_TOKENS) if flags.device == "cuda" else int(flags.tokens)


def measure(
    geometry: str, llm: LLM, recorder: StepRecorder, batch: int, flags: argparse.Namespace
) -> Iterator[ResultRow]:
    """All that is measured of one batch size."""
    times = time_calls(llm, recorder, batch, flags)
    bar = BAR_ALONE if batch == 1 else BAR_TOGETHER
    print(
        f"{geometry} generate batch {batch}: {times.wall_s * 1e3:.3f} ms a step, the step alone "
        f"{times.replay_s * 1e3:.3f} ms: {times.idle_share:.1%} idle, "
        f"{'meets' if times.idle_share <= bar else 'MISSES'} the bar of {bar:.0%}",
        flush=True,
    )
    values = {
        ("idle.generate", "step_ms"): times.wall_s * 1e3,
        ("idle.replay", "step_ms"): times.replay_s * 1e3,
        ("idle.generate", "idle_share"): times.idle_share,
    }
    if flags.device == "cuda":
        shares = trace_call(llm, recorder, batch, flags)
        print(
            f"{geometry} traced batch {batch}: {shares.num_steps} steps of "
            f"{shares.step_us / 1e3:.3f} ms, between steps {shares.between:.1%}, without a kernel "
            f"{shares.no_kernel:.1%}, without kernel or copy {shares.no_work:.1%}",
            flush=True,
        )
        values |= {
            ("idle.traced-between-steps", "idle_share"): max(shares.between, 0.0),
            ("idle.traced-without-kernel", "idle_share"): max(shares.no_kernel, 0.0),
        }
    for (bench, metric), value in values.items():
        yield ResultRow(
            bench=bench,
            geometry=geometry,
            dtype="bfloat16",
            batch=batch,
            context=flags.context,
            metric=metric,
            value=value,
            unit=METRIC_UNITS[metric],
        )


def time_calls(
    llm: LLM, recorder: StepRecorder, batch: int, flags: argparse.Namespace
) -> StepTimes:
    """The wall time of a step, and of the last whole step run again."""
    num_less = max(flags.tokens // 4, 1)
    num_more = max(flags.tokens, num_less + 1)
    generate(llm, batch, num_more, flags)
    walls = []
    for _ in range(NUM_REPEATS):
        less_s = generate(llm, batch, num_less, flags)
        recorder.forget()
        more_s = generate(llm, batch, num_more, flags)
        walls.append((more_s - less_s) / (num_more - num_less))
    wait_idle(llm)
    assert len(recorder.rows) == batch, "not all requests came to decode together"
    time_again = time_steps if flags.device == "cuda" else time_on_host
    return StepTimes(statistics.median(walls), time_again(recorder.run_again))


def generate(llm: LLM, batch: int, num_tokens: int, flags: argparse.Namespace) -> float:
    """Seconds that one call takes; every prompt of other random tokens."""
    random = Random(batch)
    prompts = [[random.randrange(1000) for _ in range(flags.context)] for _ in range(batch)]
    params = SamplingParams(
        temperature=flags.temperature, max_tokens=num_tokens, ignore_eos=True, seed=0
    )
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def time_on_host(run: Callable[[], object]) -> float:
    """Median seconds of a run that is over when it returns."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait_idle(llm: LLM) -> None:
    """A step may be in flight after the last update."""
    while llm.stats().num_slots_used:
        time.sleep(POLL_S)


def trace_call(
    llm: LLM, recorder: StepRecorder, batch: int, flags: argparse.Namespace
) -> IdleShares:
    """Shares of steps in the midst of a call, all of its requests decoding."""
    with recording():  # the first takes long to begin
        pass
    recorder.forget()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(generate, llm, batch, TRACED_TOKENS, flags)
        wait_for(lambda: len(recorder.rows) == batch, call)
        with recording() as recorded:
            num_before = recorder.num_steps
            wait_for(lambda: recorder.num_steps >= num_before + NUM_TRACED_STEPS, call)
        call.result()
    return idle_shares(recorded.read())


def wait_for(condition: Callable[[], bool], call: Future[float]) -> None:
    """Wait until `condition` is true, or raise when the call ends before."""
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while not condition():
        if call.done() or time.monotonic() > deadline:
            raise RuntimeError("the call ended before enough steps were traced")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
