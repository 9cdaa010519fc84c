"""Timing kernels on CUDA: graph replays over rotated buffers, against measured ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_BYTES_PER_REPLAY = 400 * 2**20  # far more than the L2 cache holds
MIN_RUNS_PER_REPLAY = 32  # starting a graph takes microseconds that belong to no kernel
READ_BLOCK = 4096


class Ceiling(StrEnum):
    """What bounds a kernel: reading, reading and writing alike, or bf16 matrix products."""

    READ = "read"
    COPY = "copy"
    FLOPS = "flops"


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One kernel at one size.

    `geometry` is a folder of bench/geometries; batch, rows_per_request and context as in
    `server.bench.results.ResultRow`. `runs` do the same work on different buffers, so that
    together they miss the L2 cache; all of them are captured in one graph. `num_bytes` and
    `flops` are the least that one run must move and compute. `min_share` of the ceiling and
    `max_us` are the bars, where there are any.
    """

    name: str
    geometry: str
    dtype: str
    batch: int
    rows_per_request: int = 1
    context: int = 0
    runs: Sequence[Callable[[], object]]
    ceiling: Ceiling
    num_bytes: int = 0
    flops: int = 0
    min_share: float | None = None
    max_us: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run: bytes per second read and copied, bf16 flops per second."""

    read: float
    copy: float
    flops: float

    def floor_s(self, case: KernelCase) -> float:
        """The least time the machine could take for one run of the case."""
        if case.ceiling is Ceiling.FLOPS:
            return case.flops / self.flops
        return case.num_bytes / (self.read if case.ceiling is Ceiling.READ else self.copy)


def time_in_graph(
    runs: Sequence[Callable[[], object]],
    *,
    num_replays: int = 20,
    min_runs: int = MIN_RUNS_PER_REPLAY,
) -> float:
    """Median seconds of one run: all runs, repeatedly, in one CUDA graph, which is replayed."""
    runs = list(runs) * -(-min_runs // len(runs))
    torch.cuda.synchronize()  # what the runs read was made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(runs))
    return statistics.median(times)


@triton.jit
def sum_kernel(x_ptr, out_ptr, num_per_program, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    first = tl.program_id(0).to(tl.int64) * num_per_program
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_per_program, BLOCK, num_stages=4):
        total += tl.load(x_ptr + first + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def read_once(x: Tensor, out: Tensor) -> None:
    """Read every 32-bit word of x once, with as many programs as out has entries."""
    num_per_program = x.numel() // out.numel()
    assert num_per_program % READ_BLOCK == 0
    sum_kernel[(out.numel(),)](x, out, num_per_program, BLOCK=READ_BLOCK, num_warps=8)


def time_alone(run: Callable[[], object], *, num_runs: int = 20) -> float:
    """Median seconds of a long run, launched as it is (a graph copies with another engine)."""
    run()
    times = []
    for _ in range(num_runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measure_ceilings() -> Ceilings:
    """Copy and read 4 GiB, multiply 8192-wide random matrices."""
    num_bytes = 4 * 2**30
    source = torch.randint(0, 1000, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy_s = time_alone(lambda: target.copy_(source))
    read_s = min(
        time_alone(lambda out=out: read_once(source, out))  # type: ignore[misc]
        for out in (torch.empty(n, dtype=torch.int32, device="cuda") for n in (2048, 8192, 32768))
    )
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = time_alone(lambda: left @ right)
    return Ceilings(
        read=num_bytes / read_s, copy=2 * num_bytes / copy_s, flops=2 * 8192**3 / product_s
    )
