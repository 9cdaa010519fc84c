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

from bench.device_trace import IdleShares, TraceError, idle_shares, recording
from bench.processes import run_alone
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
# A recording takes a while to begin, and the call must not end before.
TRACED_CALL_S = 6.0
MAX_TRACED_TOKENS = 2048
# What each request of the largest batch has room for; one alone has room for all.
MIN_ROOM = 640
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
    for geometry in flags.geometry.split(","):
        rows += run_alone(measure_geometry, geometry, flags)
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device=flags.device)


def measure_geometry(geometry: str, flags: argparse.Namespace) -> list[ResultRow]:
    """All batch sizes of one geometry. Traces come last: they slow down what follows."""
    recorder = StepRecorder()
    batches = [int(size) for size in flags.batch.split(",")]
    rows: list[ResultRow] = []
    walls: dict[int, float] = {}
    with recorder.patch(), start_llm(geometry, max(batches), flags) as llm:
        for batch in batches:
            times = time_calls(llm, recorder, batch, flags)
            walls[batch] = times.wall_s
            rows += time_rows(geometry, times, batch, flags)
        for batch in batches if flags.device == "cuda" else ():
            try:
                shares = trace_call(llm, recorder, batch, walls[batch], flags)
            except TraceError as fault:
                print(f"{geometry} traced batch {batch}: {fault}", flush=True)
            else:
                rows += share_rows(geometry, shares, batch, flags)
    return rows


def start_llm(geometry: str, max_requests: int, flags: argparse.Namespace) -> LLM:
    """An engine with made-up weights that holds all requests to their last token."""
    room = max(flags.tokens, MIN_ROOM)
    longest = flags.context + max(flags.tokens, MAX_TRACED_TOKENS)
    num_pages = max(max_requests * -(-(flags.context + room) // 64), -(-longest // 64))
    return LLM(
        str(GEOMETRIES / geometry),
        load_format="dummy",
        device=flags.device,
        dtype="bfloat16",
        compile=flags.compile,
        overlap=flags.overlap,
        page_size=64,
        max_running_requests=max_requests,
        max_model_len=longest,
        max_kv_tokens=64 * num_pages,
    )


def time_rows(
    geometry: str, times: StepTimes, batch: int, flags: argparse.Namespace
) -> Iterator[ResultRow]:
    """What the wall times say."""
    bar = BAR_ALONE if batch == 1 else BAR_TOGETHER
    print(
        f"{geometry} generate batch {batch}: {times.wall_s * 1e3:.3f} ms a step, the step alone "
        f"{times.replay_s * 1e3:.3f} ms: {times.idle_share:.1%} idle, "
        f"{'meets' if times.idle_share <= bar else 'MISSES'} the bar of {bar:.0%}",
        flush=True,
    )
    yield row("idle.generate", geometry, batch, flags, "step_ms", times.wall_s * 1e3)
    yield row("idle.replay", geometry, batch, flags, "step_ms", times.replay_s * 1e3)
    yield row("idle.generate", geometry, batch, flags, "idle_share", times.idle_share)


def share_rows(
    geometry: str, shares: IdleShares, batch: int, flags: argparse.Namespace
) -> Iterator[ResultRow]:
    """What the trace says."""
    print(
        f"{geometry} traced batch {batch}: {shares.num_steps} steps of "
        f"{shares.step_us / 1e3:.3f} ms, between steps {shares.between:.1%}, without a kernel "
        f"{shares.no_kernel:.1%}, without kernel or copy {shares.no_work:.1%}",
        flush=True,
    )
    yield row("idle.traced-between-steps", geometry, batch, flags, "idle_share", shares.between)
    without = max(shares.no_kernel, 0.0)  # rounding
    yield row("idle.traced-without-kernel", geometry, batch, flags, "idle_share", without)


def row(
    bench: str, geometry: str, batch: int, flags: argparse.Namespace, metric: str, value: float
) -> ResultRow:
    """One result."""
    return ResultRow(
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
    llm: LLM, recorder: StepRecorder, batch: int, wall_s: float, flags: argparse.Namespace
) -> IdleShares:
    """Shares of steps in the midst of a call, all of its requests decoding."""
    wanted = max(round(TRACED_CALL_S / wall_s), 3 * NUM_TRACED_STEPS)
    num_tokens = min(wanted, MAX_TRACED_TOKENS if batch == 1 else max(flags.tokens, MIN_ROOM))
    recorder.forget()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(generate, llm, batch, num_tokens, flags)
        wait_for(lambda: len(recorder.rows) == batch, call)
        with recording() as recorded:
            num_before = recorder.num_steps
            wait_for(lambda: recorder.num_steps >= num_before + NUM_TRACED_STEPS, call)
        call.result()
    return idle_shares(recorded.read())


def wait_for(condition: Callable[[], bool], call: Future[float]) -> None:
    """Wait until `condition` is true.

    Raises:
        TraceError: the call ended before.
    """
    deadline = time.monotonic() + TRACE_TIMEOUT_S
    while not condition():
        if call.done() or time.monotonic() > deadline:
            raise TraceError("the call ended before enough steps were traced")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
