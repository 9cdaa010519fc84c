"""Compile every kernel for sm_90 without a GPU, at the sizes of real models.

    python -m tools.compile_kernels [--only AREAS] [--json FILE] [--jobs PROCESSES]

Prints registers, shared memory and spills of each specialisation. Exits with 1 if one spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.compile_kernels.areas import AREAS, compile_area


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="compile every kernel for sm_90")
    parser.add_argument("--only", default=",".join(AREAS), help="areas, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the table there")
    parser.add_argument("--jobs", type=int, default=1, help="areas compiled at the same time")
    flags = parser.parse_args()
    areas = flags.only.split(",")
    if flags.jobs > 1:
        # Fresh processes: a fork would copy the threads' locks of torch and Triton.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(flags.jobs, mp_context=spawn) as pool:
            kernels = [kernel for found in pool.map(compile_area, areas) for kernel in found]
    else:
        kernels = [kernel for area in areas for kernel in compile_area(area)]
    if flags.json is not None:
        flags.json.write_text(json.dumps([dataclasses.asdict(kernel) for kernel in kernels]))
    return 1 if any(kernel.spill_bytes for kernel in kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
