"""S7: what the benchmarks read from a trace. Oracle throughout: spans by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.device_trace import (
    MARK,
    MARK_CATEGORY,
    DeviceTrace,
    TraceError,
    busy_us,
    idle_shares,
    kernel_table,
    parse_trace,
    record_each,
)


def event(category: str, name: str, start: float, end: float, correlation: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "args": {"correlation": correlation},
    }


def steps_trace() -> DeviceTrace:
    """Four steps of two kernels at 0, 100, 200, 300, each launched as a graph behind a copy."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for step in range(4):
        at, graph, copy = 100.0 * step, 10 + step, 50 + step
        events += [
            event("cuda_runtime", "cudaMemcpyAsync", at - 80, at - 79, copy),
            event("cuda_runtime", "cudaGraphLaunch", at - 70, at - 60, graph),
            event("cuda_driver", "cuGraphLaunch", at - 69, at - 61, graph),
            event("cuda_runtime", "cudaEventRecord", at - 50, at - 49, 90 + step),
            event("gpu_memcpy", "Memcpy HtoD", at - 4, at - 2, copy),
            event("kernel", "second", at + 50, at + 90, graph),
            event("kernel", "first", at, at + 40, graph),
        ]
    events.append(event("kernel", "stray", 92.0, 93.0, 99))
    events += [
        event(MARK_CATEGORY, f"{MARK}{n}", 200.0 * n - 90, 200.0 * n - 20, 0) for n in (1, 0)
    ]
    return parse_trace(json.dumps({"traceEvents": events}))


def test_steps_are_the_kernels_of_a_graph_launch() -> None:
    """S7: in order, without kernels that were launched alone; calls are counted once."""
    trace = steps_trace()
    assert [[k.name for k in step] for step in trace.steps()] == [["first", "second"]] * 4
    assert len(trace.calls) == 8 and len(trace.kernels) == 9 and len(trace.copies) == 4


def test_a_mark_has_what_was_launched_in_it() -> None:
    """S7: by the time of the call, not of the kernel, which may run later."""
    trace = steps_trace()
    parts = [trace.launched_in(mark) for mark in trace.marks]
    assert [[k.start_us for k in part.kernels] for part in parts] == [[0, 50], [200, 250]]
    assert [[c.start_us for c in part.copies] for part in parts] == [[-4], [196]]
    assert [len(part.calls) for part in parts] == [2, 2]


def test_each_run_is_recorded_once() -> None:
    """S7: as torch writes it; without a GPU there is nothing in it but the marks."""
    runs: list[int] = []
    traces = record_each([lambda: runs.append(1), lambda: runs.append(2)])
    assert runs == [1, 1, 2]
    assert [trace.marks[0].name for trace in traces] == [f"{MARK}1", f"{MARK}2"]
    assert all(not trace.kernels for trace in traces)


def test_idle_shares() -> None:
    """S7: of three whole steps: 20 of 100 us without a kernel, 10 of them between steps."""
    shares = idle_shares(steps_trace(), num_dropped=0)
    assert (shares.num_steps, shares.step_us) == (3, 100.0)
    assert shares.between == pytest.approx(0.1)
    assert shares.no_kernel == pytest.approx((60 - 1) / 300)
    assert shares.no_work == pytest.approx((60 - 1 - 6) / 300)
    with pytest.raises(TraceError, match="two whole steps"):
        idle_shares(steps_trace(), num_dropped=2)


def test_overlapping_kernels_count_once() -> None:
    """S7: two streams at work are no more than all of the time."""
    events = [event("kernel", "k", start, end, 0) for start, end in ((0, 6), (2, 4), (5, 8))]
    kernels = parse_trace(json.dumps({"traceEvents": events})).kernels
    assert busy_us(kernels, 0, 10) == 8
    assert busy_us(kernels, 3, 7) == 4


def test_kernel_table_ranks_by_time() -> None:
    """S7: the longest first, the rest summed up."""
    lines = kernel_table(steps_trace().kernels, num_names=1).splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "others", "all"]
    assert lines[2].split()[0] == "321.0"
