"""Every kernel compiles for sm_90 without a GPU, and fits; the tool that says so can say no."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MAX_SHARED_BYTES = 227 * 1024  # what one program may have on sm_90


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python without the interpreter, which tests/conftest.py turns on in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def is_triton_function(function: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list
    )


def entry_kernels() -> set[str]:
    """The names of all functions that programs start from."""
    paths = sorted((ROOT / "graphs" / "kernels").rglob("*_kernel.py"))
    functions = [
        node
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and is_triton_function(node)
    ]
    return {function.name for function in functions if function.name.endswith("_kernel")}


def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    """E2: compiled at real sizes; not a byte of spills is allowed to any of them.

    Oracle: ptxas, and the kernels named in the source.
    """
    table = tmp_path / "kernels.json"
    result = run_module("tools.compile_kernels", "--jobs", "2", "--json", str(table))
    assert table.exists(), result.stderr[-4000:]
    kernels: list[dict[str, Any]] = json.loads(table.read_text())
    assert "matvec_kernel" in entry_kernels()
    missing = entry_kernels() - {kernel["name"] for kernel in kernels}
    assert not missing, f"never compiled: {sorted(missing)}"
    assert [kernel for kernel in kernels if kernel["spill_bytes"] > 0] == []
    assert [kernel for kernel in kernels if kernel["shared_bytes"] > MAX_SHARED_BYTES] == []
    assert all(kernel["registers"] > 0 for kernel in kernels)
    assert result.returncode == 0


@pytest.mark.parametrize(("kernel", "return_code"), [("sound", 0), ("spilling", 1)])
def test_a_spilling_kernel_fails(kernel: str, return_code: int, tmp_path: Path) -> None:
    """E2: Oracle: kernels that hold one value, and far more values than there are registers."""
    table = tmp_path / "kernels.json"
    result = run_module("tests.tools.compile_probe", kernel, "--json", str(table))
    assert result.returncode == return_code, result.stderr[-4000:]
    (compiled,) = json.loads(table.read_text())
    assert compiled["name"] == f"{kernel}_kernel"
    assert (compiled["spill_bytes"] > 0) == (return_code == 1)


def test_a_kernel_that_does_not_compile_fails() -> None:
    """E2: Oracle: a block whose size Triton's compiler refuses."""
    result = run_module("tests.tools.compile_probe", "broken")
    assert result.returncode == 1
    assert "CompilationError" in result.stderr
