"""Batches that end early, and their resumption."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, EngineDeadError
from engine.config import EngineConfig
from engine.request import NewRequest
from engine.tokens import Tokenizer
from server.batch.job import run_batch
from tests.server.batch_files import (
    BatchFolder,
    by_id,
    chat_line,
    dump,
    read_lines,
    text_line,
    without_names,
)
from tests.server.stub_engine import StubEngine


@pytest.fixture
def batch(tmp_path: Path, engine: StubEngine) -> BatchFolder:
    """An empty folder and the stub engine."""
    return BatchFolder(tmp_path, engine)


def test_resume_runs_what_is_missing(batch: BatchFolder) -> None:
    """S5: a torn last line is cut and run again; each id is there once; failures count."""
    lines = [text_line("a"), b"bad", text_line("b"), text_line("b"), chat_line("c")]
    batch.write(*lines)
    assert batch.run() == 1
    whole = batch.output.read_bytes()
    complete = read_lines(batch.output)
    kept = whole.splitlines(keepends=True)
    for cut in (1, 2, 16, 17, 18, 60, len(kept[-1]) - 2):
        torn = whole[: -len(kept[-1]) + cut]
        batch.output.write_bytes(torn)
        batch.engine.requests.clear()
        assert batch.run(is_resumed=True) == 1
        assert batch.output.read_bytes().startswith(b"".join(kept[:-1]))
        assert len(batch.engine.requests) <= 1
        resumed = read_lines(batch.output)
        assert sorted(map(outline, resumed)) == sorted(map(outline, complete))


def outline(result: dict[str, Any]) -> tuple[str, int, str]:
    """What a result is about, for a comparison of two runs."""
    body = result["response"]["body"]
    return str(result["custom_id"]), result["response"]["status_code"], str(without_names(body))


def test_resume_keeps_a_whole_line_without_an_end(batch: BatchFolder) -> None:
    """S5: a result whose line feed is missing is a result. Oracle: the bytes before."""
    batch.write(text_line("a"), text_line("b"))
    assert batch.run() == 0
    whole = batch.output.read_bytes()
    batch.output.write_bytes(whole[:-1])
    batch.engine.requests.clear()
    assert batch.run(is_resumed=True) == 0
    assert batch.output.read_bytes() == whole
    assert batch.engine.requests == []


def test_resume_after_an_early_repeated_id(batch: BatchFolder) -> None:
    """S5: the error of a repeated id is not taken for the result of the id's first line."""
    batch.write(text_line("a"), text_line("a"))
    assert batch.run() == 1
    error = next(line for line in read_lines(batch.output) if line["error"])
    batch.output.write_bytes(dump(error) + b"\n")
    assert batch.run(is_resumed=True) == 1
    statuses = [result["response"]["status_code"] for result in read_lines(batch.output)]
    assert statuses == [400, 200]


def test_resume_reads_both_files(batch: BatchFolder) -> None:
    """S5: what failed into the error file is not run again, and still counts as failed."""
    batch.write(text_line("a"), text_line("b", n=0), b"bad")
    assert batch.run(error_file=batch.error_file) == 1
    before = batch.output.read_bytes(), batch.error_file.read_bytes()
    assert batch.run(error_file=batch.error_file, is_resumed=True) == 1
    assert (batch.output.read_bytes(), batch.error_file.read_bytes()) == before


def test_a_resumed_batch_without_output_starts(batch: BatchFolder) -> None:
    """S5: --resume may always be given."""
    batch.write(text_line("a"))
    assert batch.run(is_resumed=True) == 0
    assert set(by_id(batch.output)) == {"a"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_cleanly(batch: BatchFolder, number: int) -> None:
    """S5: exit code 128 + signal, what is written stays valid, and --resume completes it."""
    batch.write(*(text_line(f"{i}") for i in range(40)))
    engine = batch.engine
    answer = engine.reply

    def reply(request: NewRequest) -> Any:
        if len(engine.requests) == 20:
            os.kill(os.getpid(), number)
        return answer(request)

    engine.reply = reply
    assert batch.run() == 128 + number
    assert engine.is_closed
    assert set(engine.finished) | set(engine.aborted) == {r.request_id for r in engine.requests}
    num_before = len(by_id(batch.output))
    assert num_before < 40
    assert batch.run(is_resumed=True) == 0
    assert set(by_id(batch.output)) == {f"{i}" for i in range(40)}


def test_a_dead_engine_fails_no_line(
    batch: BatchFolder, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """S5: its death is exit code 2 and no result for lines that may run later."""
    batch.write(*(text_line(f"{i}") for i in range(40)))
    engine = batch.engine
    answer = engine.reply

    def reply(request: NewRequest) -> Any:
        if len(engine.requests) == 20:
            engine.die()
        return answer(request)

    engine.reply = reply
    assert batch.run() == 2
    assert "--resume" in caplog.text
    assert all(result["error"] is None for result in read_lines(batch.output))
    batch.engine = StubEngine(tokenizer, answer)
    assert batch.run(is_resumed=True) == 0
    assert set(by_id(batch.output)) == {f"{i}" for i in range(40)}


def test_an_engine_that_does_not_start(batch: BatchFolder) -> None:
    """S5: exit code 2, and the empty output is no obstacle to the next run."""

    async def start_engine(config: EngineConfig) -> EngineClient:
        raise EngineDeadError("out of memory")

    batch.write(text_line("a"))
    assert run_batch(batch.options(), start_engine) == 2
    assert batch.run() == 0
