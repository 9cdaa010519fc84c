"""House rules that a reader can rely on, checked on the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "graphs", "spec", "server")
MAX_FILE_LINES = 360
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 90  # one Triton kernel is one function: state in registers cannot be handed on
FORBIDDEN_NAMES = {"utils", "misc", "common", "helpers"}
# torch and Triton take the folders of their caches from nowhere else.
ENVIRONMENT_HOME = Path("engine/compile_cache.py")
# The engine loads speculation by name, and that loads the proposers of third parties.
DYNAMIC_IMPORT_HOMES = (Path("engine/spec_protocol.py"), Path("spec/registry.py"))


def package_files() -> list[Path]:
    return sorted(
        path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*.py")
    )


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        body = body[1:]
    assert body[-1].end_lineno is not None
    return body[-1].end_lineno - body[0].lineno + 1


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_file_follows_the_house_rules(path: Path) -> None:
    """V4 and the house: sizes, imports at the top, no ambient state. Oracle: the rules."""
    tree = parse(path)
    assert path.stem not in FORBIDDEN_NAMES
    assert len((ROOT / path).read_text().splitlines()) <= MAX_FILE_LINES
    for function in functions(tree):
        is_kernel = path.stem.endswith("_kernel")
        assert code_lines(function) <= (MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES), (
            function.name
        )
        assert not function.name.endswith("_context"), function.name
        for node in ast.walk(function):
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            assert not is_import, f"{function.name} imports locally"
            assert not isinstance(node, ast.Global), f"{function.name} has a global"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and path != ENVIRONMENT_HOME:
            assert node.attr != "environ", "numerics and options never come from the environment"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            probes = node.func.id == "getattr" and len(node.args) == 3
            assert not probes, "getattr with a default: declare the attribute instead"
    if path not in DYNAMIC_IMPORT_HOMES:
        assert "import_module" not in (ROOT / path).read_text()


def test_the_changelog_knows_the_version() -> None:
    """House: one version everywhere. Oracle: engine.version."""
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_says_why() -> None:
    """House: each line of a dependency list in pyproject.toml has its reason beside it."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    listed = [line for line in lines if line.startswith('    "') and any(c in line for c in "<>=")]
    assert len(listed) > 10
    assert all("# " in line for line in listed), [line for line in listed if "# " not in line]
