"""Kernels that must not pass `tools.compile_kernels`; a program of test_compile_kernels.py.

python -m tests.tools.compile_probe KERNEL [flags of tools.compile_kernels]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl

from tools.compile_kernels.__main__ import main
from tools.compile_kernels.areas import AREAS


@triton.jit
def sound_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    o_x = tl.arange(0, BLOCK)
    tl.store(out_ptr + o_x, tl.load(x_ptr + o_x))


@triton.jit
def spilling_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    o_x = tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o_x)
    tl.store(out_ptr + o_x, b_x * tl.sum(b_x))  # 512 values a thread wait for the sum


@triton.jit
def broken_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    o_x = tl.arange(0, BLOCK - 1)  # not a power of two
    tl.store(out_ptr + o_x, tl.load(x_ptr + o_x))


KERNELS = {"sound": sound_kernel, "spilling": spilling_kernel, "broken": broken_kernel}


def calls(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """One launch of the named kernel."""
    x = torch.empty(32 if name == "sound" else 32 * 512)
    kernel = KERNELS[name]
    yield "launch", lambda: kernel[(1,)](x, x, BLOCK=x.numel(), num_warps=1)


if __name__ == "__main__":
    AREAS.clear()
    AREAS["probe"] = partial(calls, sys.argv.pop(1))
    sys.exit(main())
