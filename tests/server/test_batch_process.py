"""`deltaloom batch` as a process of its own, with the embedded model."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.server.batch_files import by_id, chat_line, dump

NUM_LINES = 12
NUM_TOKENS = 24
WAIT_S = 120.0
ENGINE_FLAGS = (
    "--compile", "off", "--num-threads", "1", "--device", "cpu", "--max-running-requests", "2",
    "--max-model-len", "128", "--max-queued-requests", "3", "--served-model-name", "tiny",
)  # fmt: skip


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A batch on the folder's in.jsonl."""
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return subprocess.Popen(
        [sys.executable, "-m", "server.cli", "batch", *files, *ENGINE_FLAGS, *flags],
        stderr=subprocess.PIPE,
    )


def wait_for_results(path: Path, num_results: int) -> None:
    """Wait until the output has some whole lines."""
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists() or path.read_bytes().count(b"\n") < num_results:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def wait_for_end(processes: Sequence[psutil.Process]) -> None:
    """The engine process ends soon after its front end."""
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert not alive


def write_input(folder: Path) -> set[str]:
    """NUM_LINES chat lines of NUM_TOKENS tokens each; their ids."""
    ids = [f"line {number}" for number in range(NUM_LINES)]
    asked = {"model": "tiny", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [chat_line(custom_id, **asked) for custom_id in ids]
    (folder / "in.jsonl").write_bytes(b"".join(dump(line) + b"\n" for line in lines))
    return set(ids)


def test_killed_then_resumed(tmp_path: Path) -> None:
    """S5: after kill -9, --resume gives each custom_id exactly once.

    Oracle: the set of ids in the input; no result of the killed run is touched.
    """
    ids = write_input(tmp_path)
    output = tmp_path / "out.jsonl"
    with start(tmp_path) as process:
        wait_for_results(output, 2)
        children = psutil.Process(process.pid).children()
        process.kill()
        process.communicate(timeout=WAIT_S)
    wait_for_end(children)
    killed = output.read_bytes()
    assert killed.count(b"\n") < NUM_LINES
    # What a kill in the middle of a write leaves behind.
    output.write_bytes(killed + killed[:100])

    with start(tmp_path, "--resume", "--progress", "on") as process:
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said.decode()
    assert f"{NUM_LINES}/{NUM_LINES}".encode() in said
    assert output.read_bytes().startswith(killed)
    results = by_id(output)
    assert set(results) == ids
    usages = [result["response"]["body"]["usage"] for result in results.values()]
    assert [usage["completion_tokens"] for usage in usages] == [NUM_TOKENS] * NUM_LINES


@pytest.mark.e2e
def test_interrupted(tmp_path: Path) -> None:
    """S5: Ctrl-C ends both processes within seconds, without a traceback, exit code 130."""
    write_input(tmp_path)
    output = tmp_path / "out.jsonl"
    with start(tmp_path) as process:
        wait_for_results(output, 2)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGINT, said.decode()
    assert b"Traceback" not in said
    wait_for_end(children)
    assert 2 <= len(by_id(output)) < NUM_LINES
