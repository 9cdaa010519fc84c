"""Load levels: how many requests, with which prompts, and what the numbers mean."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load import (
    LoadResult,
    RequestFailedError,
    RequestTrace,
    percentile,
    run_load,
)
from server.bench.report import load_rows, render_table


def trace(start_s: float, first_s: float, last_s: float, num_output: int) -> RequestTrace:
    """A trace of a 100-token prompt."""
    return RequestTrace(
        started_s=start_s,
        first_token_s=first_s,
        last_token_s=last_s,
        num_prompt_tokens=100,
        num_output_tokens=num_output,
    )


@dataclass
class RecordingTarget:
    """Answers at once and remembers its prompts and the largest number of open requests."""

    failing: int | None = None
    prompts: list[float] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def measure(self, random: Random) -> RequestTrace:
        self.prompts.append(random.random())
        number = len(self.prompts)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(0)
            if number == self.failing:
                raise RequestFailedError("no")
            await asyncio.sleep(0)
        finally:
            self.num_open -= 1
        return trace(0.0, 1.0, 2.0, 2)


@pytest.mark.parametrize(("num_streams", "num_requests"), [(1, 3), (4, 10), (8, 3)])
async def test_streams_and_requests(num_streams: int, num_requests: int) -> None:
    """S7: as many requests as asked, as many open as asked, and no prompt twice.

    Oracle: counts in the target.
    """
    target = RecordingTarget()
    load = await run_load(target, num_streams=num_streams, num_requests=num_requests, seed="a")
    assert len(load.traces) == num_requests
    assert target.most_open == min(num_streams, num_requests)
    assert len(set(target.prompts)) == num_requests
    again, other = RecordingTarget(), RecordingTarget()
    await run_load(again, num_streams=num_streams, num_requests=num_requests, seed="a")
    await run_load(other, num_streams=num_streams, num_requests=num_requests, seed="b")
    assert again.prompts == target.prompts
    assert not set(other.prompts) & set(target.prompts)


async def test_a_failure_ends_the_load() -> None:
    """S7: a failed request is no measurement; nothing stays open."""
    target = RecordingTarget(failing=5)
    with pytest.raises(RequestFailedError):
        await run_load(target, num_streams=3, num_requests=50, seed="a")
    assert target.num_open == 0
    assert len(target.prompts) < 12


def test_rows_of_a_load() -> None:
    """S7: every number from times that are chosen by hand. Oracle: arithmetic beside them."""
    load = LoadResult(
        num_streams=1,
        wall_s=10.0,
        traces=[
            trace(0.0, 0.5, 2.5, 11),  # 0.2 s per token
            trace(3.0, 3.1, 5.1, 21),  # 0.1 s per token
            trace(6.0, 6.2, 6.2, 1),  # no token after the first
        ],
    )
    rows = load_rows(load, bench="http", geometry="Some-4B", dtype="float32")
    values = {(row.bench, row.metric): row.value for row in rows}
    assert values == {
        ("http.p50", "ttft_ms"): 200.0,
        ("http.p90", "ttft_ms"): 500.0,
        ("http.p99", "ttft_ms"): 500.0,
        ("http.p50", "tpot_ms"): 100.0,
        ("http.p90", "tpot_ms"): 200.0,
        ("http.p99", "tpot_ms"): 200.0,
        ("http.stream", "decode_tok_s"): 10.0,
        ("http.total", "decode_tok_s"): 3.3,
        ("http.stream", "prefill_tok_s"): 500.0,
    }
    assert {(row.batch, row.context, row.geometry) for row in rows} == {(1, 100, "Some-4B")}
    table = render_table([load])
    head, line = table.splitlines()
    assert len(head) == len(line)
    assert line.split() == [
        "1", "3", "200.0", "500.0", "100.0", "200.0", "2100.0", "2500.0", "10.0", "3.3",
    ]  # fmt: skip


def test_rows_of_single_tokens() -> None:
    """S7: answers of one token have no time per token, so no row claims one."""
    load = LoadResult(num_streams=4, wall_s=2.0, traces=[trace(0.0, 0.5, 0.5, 1)] * 4)
    rows = load_rows(load, bench="engine", geometry="x", dtype="float32")
    assert {row.metric for row in rows} == {"ttft_ms", "decode_tok_s"}
    assert [row.value for row in rows if row.metric == "decode_tok_s"] == [2.0]
    assert render_table([load])


@given(
    values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    percent=st.integers(1, 100),
)
def test_percentile(values: list[float], percent: int) -> None:
    """S7: the nearest-rank definition. Oracle: counting values."""
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    assert sum(value < found for value in values) * 100 < percent * len(values)
