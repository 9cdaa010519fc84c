"""What a source gives: documents of plain text or of chat messages."""

import glob
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.embedded_model.render import Message

Document = str | list[Message]
# A source reads the folder that fetch_sources.sh filled.
Source = Callable[[Path, random.Random], Iterator[Document]]


def find_files(root: Path, pattern: str) -> list[Path]:
    """All files below root whose name matches, hidden ones left out, sorted as strings."""
    return [Path(name) for name in sorted(glob.glob(f"{root}/**/{pattern}", recursive=True))]


def find_one(root: Path, pattern: str) -> Path:
    """The file of root whose name matches.

    Raises:
        ValueError: none does; the sources have to be fetched first.
    """
    for path in sorted(root.glob(pattern)):
        return path
    raise ValueError(f"{root} has no {pattern}; run fetch_sources.sh first")


def read_text(path: Path) -> str:
    """Read UTF-8 text, dropping bytes that are not."""
    return path.read_text(encoding="utf-8", errors="ignore")


def split_text(text: str, size: int, separator: str = "\n\n") -> Iterator[str]:
    """Cut a text at separators into pieces of about `size` characters."""
    parts: list[str] = []
    length = 0
    for part in text.split(separator):
        if length + len(part) > size and parts:
            yield separator.join(parts)
            parts, length = [], 0
        parts.append(part)
        length += len(part) + len(separator)
    if parts:
        yield separator.join(parts)
