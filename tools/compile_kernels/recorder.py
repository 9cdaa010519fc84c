"""Compiles each kernel launch for a GPU that is not there, instead of running it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
ALIGNMENT = 16
OPTIONS = ("num_warps", "num_stages", "maxnreg")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class CompiledKernel:
    """What one specialisation of a kernel needs: per thread, and bytes per program.

    `spill_bytes` is local memory per thread: spilled registers, and arrays kept there.
    """

    label: str
    name: str
    num_warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int


class Recorder:
    """Collects the distinct launches seen while `recording`, compiled."""

    def __init__(self) -> None:
        self.kernels: list[CompiledKernel] = []
        self._seen: set[str] = set()
        self._label = ""

    @contextmanager
    def recording(self, label: str) -> Iterator[None]:
        """Compile what the block launches; nothing is run, so no result means anything."""
        self._label = label

        def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self.compile(kernel, args, kwargs)

        with mock.patch.object(JITFunction, "run", run):
            yield

    def compile(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ANN401
        """Compile one launch as the JIT would specialise it, once."""
        named = dict(zip(kernel.arg_names, args, strict=False))
        named |= {name: kwargs[name] for name in kernel.arg_names if name in kwargs}
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = named.get(parameter.name, parameter.default)
            if parameter.is_constexpr or value is None or is_one(value):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            signature[parameter.name] = type_name(value)
            if is_aligned(value) and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
        key = f"{kernel.fn.__name__} {signature} {constants} {options}"
        if key in self._seen:
            return
        self._seen.add(key)
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=HOPPER, options=options)
        registers, spill_bytes = read_resources(compiled.asm["cubin"])
        self.kernels.append(
            CompiledKernel(
                label=self._label,
                name=kernel.fn.__name__,
                num_warps=compiled.metadata.num_warps,
                registers=registers,
                shared_bytes=compiled.metadata.shared,
                spill_bytes=spill_bytes,
            )
        )


def type_name(value: object) -> str:
    """Triton's name of a launch argument's type."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPE_NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


def is_one(value: object) -> bool:
    """Whether the JIT would compile the argument's value in: it does so for the integer 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def is_aligned(value: object) -> bool:
    """Whether the JIT would tell the compiler that the argument is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % ALIGNMENT == 0


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and local memory bytes per thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(CUOBJDUMP), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack, local = (
        int(re.findall(rf"{word}:(\d+)", report)[0]) for word in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local
