"""What a GPU did in a stretch of time: kernels, copies and the calls that launched them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
LAUNCHES = (
    *GRAPH_LAUNCHES,
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cuLaunchCooperativeKernel",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
COPY_CATEGORIES = ("gpu_memcpy", "gpu_memset")
CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
MARK, MARK_CATEGORY = "marked run ", "user_annotation"


class TraceError(RuntimeError):
    """A recording lacks what it was made for; whatever was timed stands."""


@dataclass(frozen=True)
class Span:
    """One kernel, copy or call, in microseconds; what a call launched has its correlation."""

    name: str
    start_us: float
    end_us: float
    correlation: int

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class DeviceTrace:
    """Spans by start. `calls`: host calls that launch something, one for each launch.

    `marks`: stretches of the host's time that `record_each` named.
    """

    kernels: list[Span]
    copies: list[Span]
    calls: list[Span]
    marks: list[Span]

    def launched_in(self, mark: Span) -> DeviceTrace:
        """The part that was launched during a mark."""
        calls = [call for call in self.calls if mark.start_us <= call.start_us <= mark.end_us]
        launched = {call.correlation for call in calls}
        return DeviceTrace(
            [kernel for kernel in self.kernels if kernel.correlation in launched],
            [copy for copy in self.copies if copy.correlation in launched],
            calls,
            [mark],
        )

    def steps(self) -> list[list[Span]]:
        """The kernels of each graph launch, in the order in which the launches ran."""
        graphs = {call.correlation for call in self.calls if call.name.startswith(GRAPH_LAUNCHES)}
        steps: dict[int, list[Span]] = {}
        for kernel in self.kernels:
            if kernel.correlation in graphs:
                steps.setdefault(kernel.correlation, []).append(kernel)
        return list(steps.values())


@dataclass(frozen=True)
class IdleShares:
    """Shares of a stretch of whole steps, over `num_steps` of them that take `step_us` each.

    `no_kernel`: no kernel ran. `no_work`: no kernel and no copy. `between`: from the end of a
    step's last kernel to the start of the next step's first.
    """

    num_steps: int
    step_us: float
    no_kernel: float
    no_work: float
    between: float


class RecordedTrace:
    """Becomes readable when its recording is over."""

    def __init__(self) -> None:
        self.trace: DeviceTrace | None = None

    def read(self) -> DeviceTrace:
        """What was recorded."""
        assert self.trace is not None, "the recording goes on"
        return self.trace


@contextmanager
def recording() -> Iterator[RecordedTrace]:
    """Record the device, and the calls of all threads, while the body runs.

    What comes after a recording in the same process runs slower: time things before.
    """
    # Crashes of CUDA graphs and recordings without a kernel have come of starting it anew.
    os.environ["TEARDOWN_CUPTI"] = "0"
    recorded = RecordedTrace()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield recorded
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        recorded.trace = parse_trace(path.read_text(errors="replace"))


def record_each(runs: Sequence[Callable[[], object]]) -> list[DeviceTrace]:
    """The trace of each run, from launch to end, in one recording."""
    with recording() as recorded:
        for index, run in enumerate((runs[0], *runs)):  # the first one wakes everything up
            with torch.profiler.record_function(f"{MARK}{index}"):
                run()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    trace = recorded.read()
    return [trace.launched_in(mark) for mark in trace.marks[1:]]


def parse_trace(text: str) -> DeviceTrace:
    """Read a trace in Chrome's format, as torch writes it."""
    kernels, copies, marks = [], [], []
    calls: dict[int, Span] = {}
    for event in json.loads(text)["traceEvents"]:
        category, name = event.get("cat"), str(event.get("name"))
        if event.get("ph") != "X":
            continue
        start_us = float(event["ts"])
        correlation = int(event.get("args", {}).get("correlation", -1))
        span = Span(name, start_us, start_us + float(event["dur"]), correlation)
        if category == "kernel":
            kernels.append(span)
        elif category in COPY_CATEGORIES:
            copies.append(span)
        elif category == MARK_CATEGORY and name.startswith(MARK):
            marks.append(span)
        elif category in CALL_CATEGORIES and name.startswith(LAUNCHES):
            # A call of the runtime may appear again as the driver's call inside it.
            calls.setdefault(correlation, span)
    return DeviceTrace(
        by_start(kernels), by_start(copies), by_start(list(calls.values())), by_start(marks)
    )


def by_start(spans: list[Span]) -> list[Span]:
    """The same spans in order."""
    return sorted(spans, key=lambda span: span.start_us)


def idle_shares(trace: DeviceTrace, num_dropped: int = 2) -> IdleShares:
    """Shares over the recorded steps but for `num_dropped` at either end.

    Raises:
        TraceError: there are too few steps, or they are no graphs.
    """
    steps = trace.steps()
    steps = steps[num_dropped : len(steps) - num_dropped]
    if len(steps) < 2:
        raise TraceError("fewer than two whole steps were recorded as launches of graphs")
    starts = [step[0].start_us for step in steps]
    ends = [max(kernel.end_us for kernel in step) for step in steps]
    first, last = starts[0], starts[-1]
    gaps = sum(max(start - end, 0.0) for start, end in zip(starts[1:], ends[:-1], strict=True))
    return IdleShares(
        num_steps=len(steps) - 1,
        step_us=(last - first) / (len(steps) - 1),
        no_kernel=1 - busy_us(trace.kernels, first, last) / (last - first),
        no_work=1 - busy_us([*trace.kernels, *trace.copies], first, last) / (last - first),
        between=gaps / (last - first),
    )


def busy_us(spans: Sequence[Span], first_us: float, last_us: float) -> float:
    """Microseconds of the stretch that at least one span covers."""
    busy, until = 0.0, first_us
    for span in by_start(list(spans)):
        start, end = max(span.start_us, until), min(span.end_us, last_us)
        if end > start:
            busy += end - start
            until = end
    return busy


def kernel_table(kernels: Sequence[Span], num_names: int = 25) -> str:
    """Kernels by name, those with the most microseconds first, and the rest in one line."""
    totals: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        count, total = totals.get(kernel.name, (0, 0.0))
        totals[kernel.name] = (count + 1, total + kernel.duration_us)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    rows = [(name, *counted) for name, counted in ranked[:num_names]]
    if left := [counted for _, counted in ranked[num_names:]]:
        rows.append((f"{len(left)} others", sum(c for c, _ in left), sum(t for _, t in left)))
    whole = sum(total for _, _, total in rows)
    rows.append(("all", len(kernels), whole))
    return "".join(
        f"{total:10.1f} us {total / max(whole, 1e-9):6.1%} {count:6d} x  {name}\n"
        for name, count, total in rows
    )
