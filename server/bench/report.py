"""Measured load as result rows and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from server.bench.load import LoadResult, percentile
from server.bench.results import METRIC_UNITS, ResultRow

MS_PER_S = 1000
PERCENTS = (50, 90, 99)
COLUMNS = (
    "streams", "requests", "ttft p50", "p99", "tpot p50", "p99", "e2e p50", "p99",
    "tok/s each", "tok/s all",
)  # fmt: skip


def load_rows(load: LoadResult, *, bench: str, geometry: str, dtype: str) -> list[ResultRow]:
    """The rows of one level of load.

    `bench` is followed by which statistic a row is: a percentile over requests, `stream` for
    what the median stream sees, or `total` for all streams together.
    """
    measured = [
        (f"p{percent}", metric, percentile(values_s, percent) * MS_PER_S)
        for metric, values_s in (("ttft_ms", load.ttfts_s), ("tpot_ms", load.tpots_s))
        if values_s
        for percent in PERCENTS
    ]
    if load.tpots_s:
        measured.append(("stream", "decode_tok_s", load.stream_tok_s))
    measured.append(("total", "decode_tok_s", load.output_tok_s))
    if load.num_streams == 1 and load.num_prompt_tokens > 0:
        # With several streams a prompt waits for others, and its time is not its own.
        rate = load.num_prompt_tokens / percentile(load.ttfts_s, 50)
        measured.append(("stream", "prefill_tok_s", rate))
    return [
        ResultRow(
            bench=f"{bench}.{statistic}",
            geometry=geometry,
            dtype=dtype,
            batch=load.num_streams,
            context=load.num_prompt_tokens,
            metric=metric,
            value=round(value, 3),
            unit=METRIC_UNITS[metric],
        )
        for statistic, metric, value in measured
    ]


def startup_row(startup_s: float, *, geometry: str, dtype: str) -> ResultRow:
    """From the start of the engine process to ready."""
    return ResultRow(
        bench="engine.start",
        geometry=geometry,
        dtype=dtype,
        batch=1,
        context=0,
        metric="startup_s",
        value=round(startup_s, 3),
        unit=METRIC_UNITS["startup_s"],
    )


def render_table(loads: Sequence[LoadResult]) -> str:
    """One line per level of load; times in ms."""
    lines: list[Sequence[str]] = [COLUMNS]
    for load in loads:
        times = [
            f"{percentile(values_s, percent) * MS_PER_S:.1f}"
            for values_s in (load.ttfts_s, load.tpots_s, load.e2es_s)
            for percent in (50, 99)
        ]
        rates = [f"{load.stream_tok_s:.1f}", f"{load.output_tok_s:.1f}"]
        lines.append((str(load.num_streams), str(len(load.traces)), *times, *rates))
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n"
        for line in lines
    )
