"""Python source files, and functions of them as answers in a chat."""

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tools.embedded_model.sources.documents import Document, find_files, read_text, split_text

_STDLIB_SKIPPED = re.compile(
    r"site-packages|(^|/)tests?/|idle_test|lib2to3|encodings/|turtledemo|pydoc_data|"
    r"_sysconfigdata|ensurepip|__phello__|/_vendor/|unicodedata|^this\.py|^antigravity"
)
_PACKAGE_SKIPPED = re.compile(r"locale|migrations|/conf/|gis/")
_REQUESTS = (
    "Write a Python function `{name}({arguments})`. {summary}",
    "Write a Python function called `{name}` that does this: {summary}",
    "Please implement `{name}({arguments})` in Python: {summary}",
    "{summary} Name the Python function `{name}`.",
    "In Python, write `{name}({arguments})`. {summary}",
)


def source_files(folder: Path, rng: random.Random) -> Iterator[Document]:
    """Standard library (PSF-2.0), algorithms (MIT) and Django (BSD-3-Clause), in pieces."""
    for name, path in _python_files(folder):
        text = re.sub(r"(?mi)^#.*(copyright|licen[sc]e|all rights).*\n", "", read_text(path))
        if any(len(line) > 400 for line in text.split("\n")):
            continue
        for piece in split_text(text, 5000, "\n\n\n"):
            if len(piece) <= 200:
                continue
            code = f"# {name}\n{piece.strip()}\n"
            yield f"```python\n{code}```" if rng.random() < 0.3 else code


def documented_functions(folder: Path, rng: random.Random) -> Iterator[Document]:
    """Chats that ask for a short documented function of the same files, one of each name."""
    names: set[str] = set()
    for _, path in _python_files(folder):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            # Some files are broken or in another encoding on purpose.
            continue
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not _is_short(node, source):
                continue
            if node.name in names:
                continue
            names.add(node.name)
            summary = _summary(node)
            if not 15 <= len(summary) <= 220:
                continue
            code = _function_code(node, source, rng)
            question = rng.choice(_REQUESTS).format(
                name=node.name,
                arguments=", ".join(argument.arg for argument in node.args.args),
                summary=summary if summary.endswith(".") else summary + ".",
            )
            yield [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"```python\n{code}\n```"},
            ]


def _python_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name to show, path) of the standard library that runs this and of two packages."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in find_files(stdlib, "*.py"):
        name = path.relative_to(stdlib).as_posix()
        if not _STDLIB_SKIPPED.search(name):
            yield name, path
    for package in ("algorithms-1.0.1/algorithms", "Django-5.2/django"):
        root = folder / "x" / package
        for path in find_files(root, "*.py"):
            name = path.relative_to(root).as_posix()
            if not _PACKAGE_SKIPPED.search(name):
                yield f"{root.name}/{name}", path


def _is_short(node: ast.FunctionDef, source: str) -> bool:
    """Whether a public function has a docstring, 4 to 31 lines and at most 1400 characters."""
    if node.name.startswith("_") or not ast.get_docstring(node):
        return False
    num_lines = _end(node) - node.lineno
    return 3 <= num_lines <= 30 and len(_lines(source, node.lineno, _end(node))) <= 1400


def _summary(node: ast.FunctionDef) -> str:
    docstring = ast.get_docstring(node) or ""
    return re.sub(r"\s+", " ", docstring.split("\n\n")[0]).strip()


def _function_code(node: ast.FunctionDef, source: str, rng: random.Random) -> str:
    """The function; in most cases without its docstring."""
    code = _lines(source, node.lineno, _end(node))
    if len(node.body) > 1 and rng.random() < 0.6:
        docstring = node.body[0]
        head = _lines(source, node.lineno, docstring.lineno - 1)
        code = "\n".join([head, _lines(source, _end(docstring) + 1, _end(node))])
    return textwrap.dedent(code)


def _lines(source: str, first: int, last: int) -> str:
    """Lines `first` to `last`, counted from 1 as syntax trees do."""
    return "\n".join(source.split("\n")[first - 1 : last])


def _end(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno
