"""Steps of real geometries on one GPU, with made-up weights.

    python -m bench.step [--geometry NAMES] [--batch SIZES] [--context N] [--compile on]
        [--results FILE]

For each geometry: the seconds that compiling and capturing take, the prefill rate of all prompts,
then whole decode steps at each batch size (rows up, embedding, blocks, head, choice of tokens) as
the decode family runs them, greedy and with every sampling parameter, beside the least time in
which the memory could deliver their bytes. Run it from the repository's root.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch

from bench.kernel_timing import measure_ceilings
from bench.step_model import StepModel, build
from engine.startup import describe_startup
from engine.token_step import GREEDY, SAMPLED
from graphs.inputs import Kind
from server.bench.results import ResultRow, write_results

NUM_STEPS = 20


def read_flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="steps on one GPU")
    parser.add_argument("--geometry", default="Qwen3.6-27B,Qwen3.6-35B-A3B")
    parser.add_argument("--batch", default="1,16,64", help="decode batch sizes")
    parser.add_argument("--context", type=int, default=1024, help="tokens before the decode step")
    parser.add_argument("--compile", default="auto", help="as of the server")
    parser.add_argument("--results", type=Path, help="default: only print")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    """Measure, print, write results."""
    flags = read_flags()
    read_rate = measure_ceilings().read
    print(f"read {read_rate / 1e12:.2f} TB/s")
    rows: list[ResultRow] = []
    batches = [int(size) for size in flags.batch.split(",")]
    for geometry in flags.geometry.split(","):
        step_model = build(geometry, max(batches), flags.context, flags.compile)
        rows += startup_rows(geometry, step_model)
        rows.append(measure_prefill(geometry, step_model))
        for batch in batches:
            rows += measure_decode(geometry, step_model, batch, read_rate)
        del step_model
        gc.collect()
        torch.cuda.empty_cache()
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device="cuda")


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
    rows, decode = step_model.decode_rows(batch), step_model.steps.decode
    for bench, plan in (("step.greedy", GREEDY), ("step.sampled", SAMPLED)):
        value = time_steps(lambda plan=plan: decode.run(rows, plan)) * 1e3  # type: ignore[misc]
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
            context=step_model.context,
            metric="step_ms",
            value=value,
            unit="ms",
            floor=floor_ms,
        )


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
