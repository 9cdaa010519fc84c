"""`deltaloom serve` as a real process, for tests that a stub cannot make honest."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

READY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServedProcess:
    """A ready server. `log` holds what it wrote to stderr so far."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def engine_process(self) -> psutil.Process:
        """The engine's own process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "engine.worker" in child.cmdline()]
        return engine


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve_process(
    command: list[str], port: int, log: Path, cwd: Path | None = None
) -> Iterator[ServedProcess]:
    """Run `command`, which serves on `port`, until ready; ends it and all its children."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd, start_new_session=True)
        try:
            wait_ready(port, process, log)
            yield ServedProcess(f"http://127.0.0.1:{port}", process, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Poll /ready; fails with the log when the process ends or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not ready after {READY_TIMEOUT_S} s:\n{log.read_text()}")


def serve_command(port: int, *flags: str) -> list[str]:
    """The command line of a quick-starting server of the embedded model."""
    start = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), "--compile", "off"]
    return [*start, "--max-running-requests", "4", "--max-kv-tokens", "8192", *flags]
