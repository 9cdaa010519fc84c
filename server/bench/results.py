"""The one shape of measured results: every file under bench/results/ has it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from engine.json_file import read_json_file
from server.bench.machine import read_machine

MAX_RESULTS_BYTES = 16 << 20
METRIC_UNITS = {
    "distinct_experts": "experts",
    "kernels_per_step": "kernels",
    "launches_per_step": "launches",
    "kernel_us": "us",
    "step_ms": "ms",
    "tpot_ms": "ms",
    "ttft_ms": "ms",
    "prefill_tok_s": "tok/s",
    "decode_tok_s": "tok/s",
    "idle_share": "share",
    "bandwidth_share": "share",
    "startup_s": "s",
}


class ResultRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured number.

    `bench` says what ran and which statistic this is (`http.p50`). `geometry` is a folder of
    bench/geometries or the embedded model's name. `batch` counts requests that run together,
    `rows_per_request` is 1 plus the drafts of a verify step, `context` counts prompt tokens.
    `floor` is the value, in the same unit, that the hardware cannot beat. `peer` names what
    was measured where that is not Deltaloom.

    Raises:
        ValueError: an unknown metric, a wrong unit, an impossible number.
    """

    bench: str
    geometry: str
    dtype: str
    batch: int
    rows_per_request: int = 1
    context: int
    metric: str
    value: float
    unit: str
    floor: float | UnsetType = UNSET
    peer: str | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.metric not in METRIC_UNITS:
            raise ValueError(f"metric must be one of {', '.join(METRIC_UNITS)}")
        if self.unit != METRIC_UNITS[self.metric]:
            raise ValueError(f"unit of {self.metric} must be {METRIC_UNITS[self.metric]!r}")
        for name, number in (("value", self.value), ("floor", self.floor)):
            if number is not UNSET and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{name} must be a finite number and at least 0")
        if self.unit == "share" and self.value > 1:
            raise ValueError(f"value of {self.metric} must be at most 1")
        for name, count, low in (
            ("batch", self.batch, 1),
            ("rows_per_request", self.rows_per_request, 1),
            ("context", self.context, 0),
        ):
            if count < low:
                raise ValueError(f"{name} must be at least {low}")
        for name in ("bench", "geometry", "dtype", "peer"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")


class BenchResults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of results: where, with what and how its rows were measured.

    `driver` and `triton` are "none" where there is none. `commit` ends in "-dirty" where
    tracked files differed from it. `date` is UTC, to the second.

    Raises:
        ValueError: an empty field or no rows.
    """

    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    command: str
    date: datetime.datetime
    rows: list[ResultRow]

    def __post_init__(self) -> None:
        for name in ("device", "driver", "torch", "triton", "commit", "command", "rows"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if self.date.tzinfo is None:
            raise ValueError("date must have a time zone")


def write_results(path: Path, rows: Sequence[ResultRow], *, command: str, device: str) -> None:
    """Write `rows` with what is known about this machine, versions and commit.

    `device` is cpu or cuda: what the measured model ran on.

    Raises:
        ValueError: the file cannot be written.
    """
    machine = read_machine(device)
    results = BenchResults(
        device=machine.device,
        driver=machine.driver,
        torch=machine.torch,
        triton=machine.triton,
        commit=machine.commit,
        command=command,
        date=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        rows=list(rows),
    )
    data = msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def read_results(path: Path) -> BenchResults:
    """Read a results file.

    Raises:
        ValueError: the file does not have the shape; the message names it and the field.
    """
    return read_json_file(path, BenchResults, max_bytes=MAX_RESULTS_BYTES)
