"""Compile every kernel for sm_90 without a GPU, at the sizes of real models.

    python -m tools.compile_kernels [--only AREAS] [--json FILE]

Prints registers, shared memory and spills of each specialisation. Exits with 1 if one spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.compile_kernels import attention, gdn, linear, moe
from tools.compile_kernels.recorder import Recorder

Call = tuple[str, Callable[[], object]]
AREAS: dict[str, Callable[[], Iterator[Call]]] = {
    "gdn": gdn.calls,
    "attention": attention.calls,
    "moe": moe.calls,
    "linear": linear.calls,
}


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="compile every kernel for sm_90")
    parser.add_argument("--only", default=",".join(AREAS), help="areas, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the table there")
    flags = parser.parse_args()
    recorder = Recorder()
    num_shown = 0
    for area in flags.only.split(","):
        for label, call in AREAS[area]():
            with recorder.recording(f"{area}: {label}"):
                call()
            for kernel in recorder.kernels[num_shown:]:
                print(
                    f"{kernel.label:44} {kernel.name:28} {kernel.num_warps:2} warps "
                    f"{kernel.registers:4} registers {kernel.shared_bytes:7} B shared "
                    f"{kernel.spill_bytes:5} B spilled",
                    flush=True,
                )
            num_shown = len(recorder.kernels)
    if flags.json is not None:
        flags.json.write_text(json.dumps([dataclasses.asdict(k) for k in recorder.kernels]))
    return 1 if any(kernel.spill_bytes for kernel in recorder.kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
