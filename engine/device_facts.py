"""What the machine offers, read once at start."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
CPUINFO_FEATURES = frozenset(("flags", "Features", "model name"))
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class DeviceFacts:
    """The device tensors live on and its free memory in bytes.

    `capability`: what code may be compiled for, such as 9.0 (CUDA) or AVX512 and a digest of the
    processor's features (CPU).
    """

    device: torch.device
    name: str
    free_bytes: int
    capability: str = ""


def read_device_facts(wanted: str) -> DeviceFacts:
    """The device for `--device`.

    Raises:
        ValueError: cuda was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if wanted == "cpu" or not has_cuda:
        return DeviceFacts(torch.device("cpu"), "cpu", free_host_bytes(), cpu_capability())
    device = torch.device("cuda", torch.cuda.current_device())
    free_bytes, _ = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFacts(
        device,
        torch.cuda.get_device_name(device),
        free_bytes,
        f"{major}.{minor} {cpu_capability()}",
    )


def cpu_capability() -> str:
    """The machine, its vector units, and a digest of all features where they can be read.

    Host code is compiled for exactly this processor, also where the model runs on a GPU.
    """
    digest = ""
    if CPUINFO.exists():
        lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
        flags = {value for name, _, value in lines if name.strip() in CPUINFO_FEATURES}
        digest = hashlib.sha256("\n".join(sorted(flags)).encode()).hexdigest()[:16]
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {digest}"


def free_host_bytes() -> int:
    """Memory that this process may still take: the system's, or its container's if less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    if CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit) - int(CGROUP_USED.read_text()))
    return max(free, 0)
