"""The shape of measured results, and every file that claims to have it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from server.bench.machine import read_machine
from server.bench.results import METRIC_UNITS, ResultRow, read_results, write_results

ROOT = Path(__file__).parents[2]
EMBEDDED_NAME = "gander-12m"
ROW: dict[str, Any] = {
    "bench": "engine.p50",
    "geometry": "Qwen3.6-27B",
    "dtype": "bfloat16",
    "batch": 1,
    "rows_per_request": 4,
    "context": 8192,
    "metric": "tpot_ms",
    "value": 5.25,
    "unit": "ms",
}
FILE: dict[str, Any] = {
    "device": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123abc",
    "command": "make bench",
    "date": "2026-01-02T03:04:05Z",
    "rows": [ROW],
}


def results_files() -> list[Path]:
    """All results in the repository."""
    return sorted((ROOT / "bench" / "results").glob("**/*.json"))


def test_results_are_only_json() -> None:
    """S7: nothing else lives among the results."""
    folder = ROOT / "bench" / "results"
    others = {path.name for path in folder.rglob("*") if path.is_file()} - {".gitkeep"}
    assert others == {path.name for path in results_files()}


@pytest.mark.parametrize("path", results_files(), ids=lambda path: path.name)
def test_every_results_file_has_the_shape(path: Path) -> None:
    """S7: fields, metrics and units, and a geometry that is known here.

    Oracle: the folders of bench/geometries.
    """
    known = {folder.name for folder in (ROOT / "bench" / "geometries").glob("*/")}
    for row in read_results(path).rows:
        assert row.geometry in known | {EMBEDDED_NAME}


def read(tmp_path: Path, content: dict[str, Any]) -> list[ResultRow]:
    """The rows of a file with this content."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    return read_results(path).rows


def test_a_good_file(tmp_path: Path) -> None:
    """S7: the shape as it was agreed, with and without the optional fields."""
    (row,) = read(tmp_path, FILE)
    assert (row.value, row.rows_per_request) == (5.25, 4)
    (row,) = read(tmp_path, FILE | {"rows": [ROW | {"floor": 4.5, "peer": "other 1.0"}]})
    assert (row.floor, row.peer) == (4.5, "other 1.0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metric": "speed"}, "metric"),
        ({"unit": "s"}, "unit of tpot_ms"),
        ({"value": -1.0}, "value"),
        ({"value": "fast"}, "value"),
        ({"value": None}, "value"),
        ({"batch": 0}, "batch"),
        ({"context": -1}, "context"),
        ({"rows_per_request": 0}, "rows_per_request"),
        ({"geometry": ""}, "geometry"),
        ({"floor": -2.0}, "floor"),
        ({"peer": ""}, "peer"),
        ({"note": "x"}, "note"),
        ({"metric": "idle_share", "unit": "share", "value": 1.5}, "idle_share"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """S7: each wrong field is named."""
    with pytest.raises(ValueError, match=rf"results\.json.*{said}"):
        read(tmp_path, FILE | {"rows": [ROW, ROW | change]})


@pytest.mark.parametrize("name", [*FILE, "note"])
def test_bad_files_are_refused(tmp_path: Path, name: str) -> None:
    """S7: a missing, empty or unknown field of the file is named."""
    changed = {key: value for key, value in FILE.items() if key != name}
    if name == "note":
        changed["note"] = "x"
    with pytest.raises(ValueError, match=name):
        read(tmp_path, changed)
    with pytest.raises(ValueError, match=name):
        read(tmp_path, changed | {name: [] if name == "rows" else ""})


def test_a_date_without_a_zone_is_refused(tmp_path: Path) -> None:
    """S7: runs on machines in different zones must sort."""
    with pytest.raises(ValueError, match="date"):
        read(tmp_path, FILE | {"date": "2026-01-02T03:04:05"})


@pytest.mark.parametrize("name", [key for key in ROW if key != "rows_per_request"])
def test_incomplete_rows_are_refused(tmp_path: Path, name: str) -> None:
    """S7: a row without one of its fields says nothing that can be compared."""
    row = {key: value for key, value in ROW.items() if key != name}
    with pytest.raises(ValueError, match=name):
        read(tmp_path, FILE | {"rows": [row]})


def test_written_results_can_be_read(tmp_path: Path) -> None:
    """S7: what is written has the shape and says where it comes from. Oracle: git."""
    path = tmp_path / "a" / "b.json"
    rows = [
        ResultRow(
            bench="x.p50",
            geometry=EMBEDDED_NAME,
            dtype="float32",
            batch=2,
            context=7,
            metric=metric,
            value=0.5,
            unit=unit,
        )
        for metric, unit in METRIC_UNITS.items()
    ]
    write_results(path, rows, command="x", device="cpu")
    results = read_results(path)
    assert results.rows == rows
    assert results.date.utcoffset() is not None
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert results.commit.removesuffix("-dirty") == (head or "unknown")
    raw = json.loads(path.read_text())
    assert list(raw) == list(FILE)
    assert set(raw["rows"][0]) == set(ROW)


def test_machine_facts() -> None:
    """S7: a CPU is named with its cores, and torch by the version that is installed."""
    machine = read_machine("cpu")
    assert re.fullmatch(r".+, \d+ cores", machine.device)
    assert machine.driver == "none"
    assert re.match(r"\d+\.\d+", machine.torch)
