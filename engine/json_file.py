"""JSON files of a checkpoint: bounded, typed, and with errors that name the file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

Decoded = TypeVar("Decoded")


def read_json_file(path: Path, shape: type[Decoded], *, max_bytes: int) -> Decoded:
    """The content of `path` as a `shape` (a msgspec struct or a container type).

    Raises:
        ValueError: the file is absent, larger than `max_bytes`, no JSON, or of another shape.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path}: larger than {max_bytes} bytes, which no such file needs")
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
