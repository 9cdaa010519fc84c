"""What a folder of compiled code holds for certain.

Compilers write files in place, so a start that is killed leaves parts of files behind, which later
starts would load. A finished start therefore records its files and their sizes, and the next one
drops every other file before it compiles.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "lock"
RECORD = "files.json"


class KeptCode:
    """The files in `parts`, folders below `folder`, in use by a start.

    While another start is under way there, nothing is dropped and nothing recorded: its files may
    be half written.
    """

    def __init__(self, folder: Path, parts: Sequence[str]) -> None:
        """Take a share of the folder; drop what no finished start has recorded, if alone in it.

        Raises:
            OSError: the folder cannot be written to, or its file system has no locks.
        """
        self._folder, self._parts = folder, tuple(parts)
        self._lock = (folder / LOCK).open("a")
        if self._is_alone():
            self._drop_unrecorded()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def record(self) -> None:
        """Note that all files are whole: after a good start, which a full disk does not undo."""
        if not self._is_alone():
            return
        sizes = {str(path.relative_to(self._folder)): size for path, size in self._files()}
        written = self._folder / f"{RECORD}.{os.getpid()}"
        try:
            written.write_text(json.dumps(sizes))
            written.replace(self._folder / RECORD)
        except OSError as fault:
            logger.warning("the next start compiles again: %s", fault)

    def close(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def _is_alone(self) -> bool:
        """Whether no other start is under way; if so, none begins until the lock changes."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _drop_unrecorded(self) -> None:
        recorded = read_record(self._folder / RECORD)
        for path, size in self._files():
            if recorded.get(str(path.relative_to(self._folder))) != size:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Every file and its bytes; links are followed nowhere."""
        for part in self._parts:
            for path in (self._folder / part).rglob("*"):
                if path.is_symlink() or not path.is_dir():
                    yield path, path.lstat().st_size


def read_record(path: Path) -> dict[str, int]:
    """The sizes by file that `path` holds; none where it is not there or not whole."""
    try:
        sizes = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return sizes if isinstance(sizes, dict) else {}
