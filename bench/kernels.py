"""Each kernel against its own byte or flop floor.

    python -m bench.kernels [--only AREAS] [--results FILE]

Run it from the repository's root on a machine with a CUDA GPU. The ceilings (read, copy, bf16
products) are measured first, in the same run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import kernels_attention, kernels_gdn, kernels_linear, kernels_moe, kernels_sample
from bench.kernel_timing import (
    MIN_RUNS_PER_REPLAY,
    Ceiling,
    Ceilings,
    KernelCase,
    measure_ceilings,
    time_in_graph,
)
from server.bench.results import ResultRow, write_results

AREAS: dict[str, Callable[[], Iterator[KernelCase]]] = {
    "gdn": kernels_gdn.cases,
    "attention": kernels_attention.cases,
    "moe": kernels_moe.cases,
    "linear": kernels_linear.cases,
    "sample": kernels_sample.cases,
}
LONG_RUN_S = 200e-6  # starting a graph does not count beside it
REST_S = 1.0  # after products at full power a GPU reads more slowly for a while


@torch.inference_mode()
def main() -> None:
    """Measure, print a table, write results."""
    parser = argparse.ArgumentParser(description="kernels against their floors")
    parser.add_argument("--only", default=",".join(AREAS), help="areas, comma-separated")
    parser.add_argument("--results", type=Path, help="default: only print")
    flags = parser.parse_args()
    ceilings = measure_ceilings()
    print(
        f"read {ceilings.read / 1e12:.2f} TB/s, copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"bf16 {ceilings.flops / 1e12:.0f} TFLOP/s"
    )
    rows = [measure(case, ceilings) for area in flags.only.split(",") for case in AREAS[area]()]
    if flags.results is not None:
        write_results(flags.results, rows, command=shlex.join(sys.argv), device="cuda")


def measure(case: KernelCase, ceilings: Ceilings) -> ResultRow:
    """One row, printed as soon as it is known."""
    is_long = ceilings.floor_s(case) > LONG_RUN_S
    us = time_in_graph(case.runs, min_runs=1 if is_long else MIN_RUNS_PER_REPLAY) * 1e6
    if case.ceiling is Ceiling.FLOPS:
        time.sleep(REST_S)
    floor_us = ceilings.floor_s(case) * 1e6
    is_met = (case.min_share is None or floor_us / us >= case.min_share) and (
        case.max_us is None or us <= case.max_us
    )
    bars = [f">= {case.min_share:.0%}"] if case.min_share is not None else []
    bars += [f"<= {case.max_us:g} us"] if case.max_us is not None else []
    verdict = f"bar {', '.join(bars)}: {'met' if is_met else 'MISSED'}" if bars else ""
    print(
        f"{case.name:24} {case.geometry:16} {case.dtype:9} batch {case.batch:3} x "
        f"{case.rows_per_request} context {case.context:6} {us:9.1f} us  "
        f"{floor_us / us:6.1%} of {case.ceiling:5} {verdict}",
        flush=True,
    )
    return ResultRow(
        bench=f"kernel.{case.name}",
        geometry=case.geometry,
        dtype=case.dtype,
        batch=case.batch,
        rows_per_request=case.rows_per_request,
        context=case.context,
        metric="kernel_us",
        value=us,
        unit="us",
        floor=floor_us,
    )


if __name__ == "__main__":
    main()
