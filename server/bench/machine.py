"""Facts about the machine and the code that a measurement was made with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NONE = "none"
UNKNOWN = "unknown"
CPUINFO = Path("/proc/cpuinfo")
REPOSITORY = Path(__file__).parents[1]
TOOL_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Machine:
    """See `BenchResults`."""

    device: str
    driver: str
    torch: str
    triton: str
    commit: str


def read_machine(device: str) -> Machine:
    """The machine this runs on; `device` is cpu or cuda.

    Asks the tools that know, so that torch need not be imported.
    """
    name, driver = read_gpu() if device == "cuda" else (read_cpu(), NONE)
    return Machine(
        device=name,
        driver=driver,
        torch=package_version("torch"),
        triton=package_version("triton"),
        commit=read_commit(),
    )


def read_gpu() -> tuple[str, str]:
    """Name and driver version of the first GPU."""
    answer = ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    name, _, driver = answer.partition("\n")[0].partition(", ")
    return name or UNKNOWN, driver or UNKNOWN


def read_cpu() -> str:
    """Model of the CPU and how many cores this process may use."""
    name = platform.machine()
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def package_version(package: str) -> str:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NONE


def read_commit() -> str:
    """The commit of this source tree, marked where tracked files differ from it."""
    commit = ask("git", "rev-parse", "HEAD")
    if not commit:
        return UNKNOWN
    has_changes = ask("git", "status", "--porcelain", "--untracked-files=no") != ""
    return f"{commit}-dirty" if has_changes else commit


def ask(*command: str) -> str:
    """What a command prints; empty where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=TOOL_TIMEOUT_S
    )
    return done.stdout.strip() if done.returncode == 0 else ""
