"""Steps of real geometries on one GPU, with made-up weights.

    python -m bench.step [--geometry NAMES] [--batch SIZES] [--context N] [--compile on]
        [--drafts K] [--profile FILE] [--results FILE]

For each geometry: the seconds that compiling and capturing take, the prefill rate of all prompts,
then whole decode steps at each batch size (rows up, embedding, blocks, head, choice of tokens) as
the decode family runs them, greedy and with every sampling parameter, beside the least time in
which the memory could deliver their bytes, with the kernels of one step and the calls that launch
them; at the end the most memory that all of it took, beside the plan. `--profile` writes where the
time of one step goes, by kernel. With `--drafts` the steps are verify steps, commit included, of
K drafts a request. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path

import torch

from bench.device_trace import DeviceTrace, kernel_table, record_each
from bench.kernel_timing import measure_ceilings
from bench.processes import run_alone
from bench.step_model import StepModel, build
from engine.memory import MemoryPlan, show, show_parts
from engine.sampler import SamplingPlan
from engine.startup import describe_startup
from engine.token_step import GREEDY, SAMPLED
from graphs.inputs import Kind
from server.bench.results import METRIC_UNITS, ResultRow, write_results

NUM_STEPS = 20
VARIANTS = (("greedy", GREEDY), ("sampled", SAMPLED))
COUNT_UNITS = {"kernels_per_step": "kernels", "launches_per_step": "launches"}


def read_flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="steps on one GPU")
    parser.add_argument("--geometry", default="Qwen3.6-27B,Qwen3.6-35B-A3B")
    parser.add_argument("--batch", default="1,16,64", help="decode batch sizes")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the decode step")
    parser.add_argument("--compile", default="auto", help="as of the server")
    parser.add_argument("--drafts", type=int, default=0, help="of a request, in a verify step")
    parser.add_argument("--profile", type=Path, help="write the kernels of a step of each size")
    parser.add_argument("--results", type=Path, help="default: only print")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write results."""
    flags = read_flags()
    read_rate = run_alone(measure_ceilings).read
    print(f"read {read_rate / 1e12:.2f} TB/s", flush=True)
    if flags.profile is not None:
        flags.profile.parent.mkdir(parents=True, exist_ok=True)
        flags.profile.write_text("")
    rows: list[ResultRow] = []
    for geometry in flags.geometry.split(","):
        rows += run_alone(measure_geometry, geometry, flags, read_rate)
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device="cuda")


@torch.inference_mode()
def measure_geometry(geometry: str, flags: argparse.Namespace, read_rate: float) -> list[ResultRow]:
    """All that is measured of one geometry. Traces come last: they slow down what follows."""
    free_bytes = torch.cuda.mem_get_info()[0]
    batches = [int(size) for size in flags.batch.split(",")]
    step_model = build(geometry, max(batches), flags.context, flags.compile, flags.drafts)
    rows = [*startup_rows(geometry, step_model), measure_prefill(geometry, step_model)]
    for batch in batches:
        rows += measure_decode(geometry, step_model, batch, read_rate)
    print_memory(geometry, step_model.plan.memory, free_bytes)
    rows += trace_decode(geometry, step_model, batches, flags.profile)
    return rows


def measure_prefill(geometry: str, step_model: StepModel) -> ResultRow:
    """Tokens per second of all prompts, the second time they run; fills the caches."""
    steps = list(step_model.prefill_steps())
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for inputs in steps:
            step_model.run(inputs)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
    num_tokens = sum(inputs.token_ids.shape[0] for inputs in steps)
    print(f"{geometry} prefill {num_tokens} tokens: {num_tokens / elapsed:.0f} tok/s", flush=True)
    return ResultRow(
        bench="step.prefill",
        geometry=geometry,
        dtype="bfloat16",
        batch=step_model.batch,
        context=step_model.context,
        metric="prefill_tok_s",
        value=num_tokens / elapsed,
        unit="tok/s",
    )


def startup_rows(geometry: str, step_model: StepModel) -> Iterator[ResultRow]:
    """Seconds of each phase before the first step."""
    seconds = step_model.startup_s
    print(f"{geometry} {describe_startup(seconds)}, {step_model.steps.decode.num_captured} graphs")
    for phase, value in seconds.items():
        yield ResultRow(
            bench=f"startup.{phase}",
            geometry=geometry,
            dtype="bfloat16",
            batch=step_model.batch,
            context=0,
            metric="startup_s",
            value=value,
            unit="s",
        )


def measure_decode(
    geometry: str, step_model: StepModel, batch: int, read_rate: float
) -> Iterator[ResultRow]:
    """Decode steps of the first `batch` requests, greedy and sampled."""
    inputs = step_model.inputs(Kind.DECODE, range(batch), step_model.context, 1)
    hit = step_model.distinct_experts(inputs)
    floor_ms = step_model.step_bytes(batch, hit) / read_rate * 1e3
    if hit:
        yield ResultRow(
            bench="decode.mean",
            geometry=geometry,
            dtype="bfloat16",
            batch=batch,
            context=step_model.context,
            metric="distinct_experts",
            value=statistics.mean(hit),
            unit="experts",
        )
    experts = f", distinct experts a layer {statistics.mean(hit):.1f}" if hit else ""
    for bench, plan in named_steps(step_model):
        value = time_steps(steps_of(step_model, batch, plan)) * 1e3
        print(
            f"{geometry} {bench} batch {batch}: {value:.2f} ms, floor {floor_ms:.2f} ms "
            f"({floor_ms / value:.1%}){experts}",
            flush=True,
        )
        yield ResultRow(
            bench=bench,
            geometry=geometry,
            dtype="bfloat16",
            batch=batch,
            rows_per_request=step_model.plan.rows_per_request,
            context=step_model.context,
            metric="step_ms",
            value=value,
            unit="ms",
            floor=floor_ms,
        )


def trace_decode(
    geometry: str, step_model: StepModel, batches: list[int], profile: Path | None
) -> Iterator[ResultRow]:
    """Kernels and launches of one step at each batch size, and where its time goes."""
    named = named_steps(step_model)
    steps = [(bench, plan, batch) for batch in batches for bench, plan in named]
    traces = record_each([steps_of(step_model, batch, plan) for _, plan, batch in steps])
    for (bench, _, batch), trace in zip(steps, traces, strict=True):
        title = (
            f"{geometry} {bench} batch {batch}: {len(trace.kernels)} kernels by "
            f"{len(trace.calls)} launches ({count_calls(trace)})"
        )
        print(title, flush=True)
        if profile is not None:
            with profile.open("a") as file:
                file.write(f"{title}\n{kernel_table(trace.kernels)}\n")
        counts = {"kernels_per_step": len(trace.kernels), "launches_per_step": len(trace.calls)}
        yield from count_rows(bench, geometry, step_model.context, batch, counts)


def named_steps(step_model: StepModel) -> list[tuple[str, SamplingPlan]]:
    """The variants that are measured, by the names of their results."""
    num_rows = step_model.plan.rows_per_request
    kind = "step" if num_rows == 1 else f"verify-{num_rows}"
    return [(f"{kind}.{name}", plan) for name, plan in VARIANTS]


def count_rows(
    bench: str, geometry: str, context: int, batch: int, counts: dict[str, int]
) -> Iterator[ResultRow]:
    """Rows of counts; those of a metric that results files do not have are only printed."""
    for metric, count in counts.items():
        if metric in METRIC_UNITS:
            yield ResultRow(
                bench=bench,
                geometry=geometry,
                dtype="bfloat16",
                batch=batch,
                context=context,
                metric=metric,
                value=count,
                unit=COUNT_UNITS[metric],
            )


def count_calls(trace: DeviceTrace) -> str:
    """How often each call was made, such as 1 cudaGraphLaunch."""
    names = Counter(call.name for call in trace.calls)
    return ", ".join(f"{count} {name}" for name, count in names.items())


def print_memory(geometry: str, plan: MemoryPlan, free_bytes: int) -> None:
    """The most that this process ever used, beside the plan.

    Of the device: all that this process took from it, graphs and loaded code too, now; what was
    freed to the allocator counts, as it stays there.
    """
    held, live = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    taken = free_bytes - torch.cuda.mem_get_info()[0]
    verdict = "within the plan" if max(held, taken) <= plan.used_bytes else "BEYOND THE PLAN"
    print(
        f"{geometry} memory: {show(live)} of tensors at most, {show(held)} held by the allocator, "
        f"{show(taken)} of the device; planned {show(plan.used_bytes)}: {verdict}\n"
        f"  planned: {show_parts(plan)}",
        flush=True,
    )


def steps_of(step_model: StepModel, batch: int, plan: SamplingPlan) -> Callable[[], object]:
    """Runs a step of the first `batch` requests, each time with the noise of another token.

    With the same noise, penalties would push the tokens that it favours out of the nucleus, and
    every draw would be rejected.
    """
    rows = cycle([step_model.step_rows(batch, index) for index in range(1, 1 + NUM_STEPS)])
    return lambda: step_model.steps.decode.run(next(rows), plan)


def time_steps(run: Callable[[], object]) -> float:
    """Median seconds of one step, with the next ones launched behind it."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    for _ in range(2):
        run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in pairwise(events))


if __name__ == "__main__":
    main()
