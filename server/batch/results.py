"""The result files of a batch: one JSON line per request, appended as it finishes.

A file that a killed batch left behind is valid up to its last line, which may be torn; it can
be taken up again.
"""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from server.batch.lines import ResultKey
from server.errors import ApiError

ID_PREFIX = "batch_req_"
LINE_ID_PREFIX = "batch_req_line_"
TORN_START = b'{"id":"batch_req_'
MAX_RESULT_BYTES = 1 << 30


class LineResponse(msgspec.Struct, frozen=True):
    """What the endpoint would have answered over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Struct


class LineError(msgspec.Struct, frozen=True):
    """Why a line failed, in short; `response.body` has it as the endpoint says it."""

    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a result file."""

    id: str
    custom_id: str | None
    response: LineResponse
    error: LineError | None = None


class WrittenResponse(msgspec.Struct, frozen=True):
    """The part of a written response that matters later."""

    status_code: int


class WrittenResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line that is already in a result file."""

    id: str
    custom_id: str | None
    response: WrittenResponse | None
    error: Any = None

    @property
    def key(self) -> ResultKey | None:
        """What the line is known by; None if it names nothing."""
        number = self.id.removeprefix(LINE_ID_PREFIX)
        if number != self.id and number.isdecimal():
            return int(number)
        return self.custom_id

    @property
    def is_failed(self) -> bool:
        """Whether it reports a failure."""
        has_answer = self.response is not None and self.response.status_code == 200
        return self.error is not None or not has_answer


def answered(custom_id: str, body: msgspec.Struct) -> LineResult:
    """The result of a request that succeeded."""
    return LineResult(
        id=ID_PREFIX + uuid.uuid4().hex,
        custom_id=custom_id,
        response=LineResponse(200, f"req_{uuid.uuid4().hex}", body),
    )


def failed(key: ResultKey, custom_id: str | None, error: ApiError) -> LineResult:
    """The result of a line that failed. A number as `key` shows in the id, to be found again."""
    return LineResult(
        id=f"{LINE_ID_PREFIX}{key}" if isinstance(key, int) else ID_PREFIX + uuid.uuid4().hex,
        custom_id=custom_id,
        response=LineResponse(error.status, f"req_{uuid.uuid4().hex}", error.body),
        error=LineError(error.error.code or error.error.type, str(error)),
    )


class ResultFile:
    """One open result file, locked against a second batch.

    `keys` and `num_failed` tell what was in it when it was opened.

    Raises:
        ValueError: the file cannot be opened or taken up; names `flag`.
    """

    def __init__(self, path: Path, flag: str, *, is_resumed: bool) -> None:
        self._name = f"{flag} {path}"
        self.keys: set[ResultKey] = set()
        self.num_failed = 0
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(f"{self._name}: {error.strerror}") from error
        try:
            if path.is_file():
                self._lock()
                self._take_up(path, is_resumed=is_resumed)
            elif is_resumed:
                raise ValueError(f"{self._name}: --resume needs a regular file")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and give the lock back."""
        self._file.close()

    def write(self, result: LineResult) -> None:
        """Append one line; it has left this process on return.

        Raises:
            ValueError: the file system refuses it, for example because it is full.
        """
        rest = memoryview(msgspec.json.encode(result) + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ValueError(f"{self._name}: {error.strerror}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self._name}: another batch is writing this file") from error

    def _take_up(self, path: Path, *, is_resumed: bool) -> None:
        if path.stat().st_size == 0:
            return
        if not is_resumed:
            raise ValueError(
                f"{self._name}: the file is not empty; give --resume to go on with it, or "
                "another name"
            )
        with path.open("rb") as file:
            valid_len = self._read(file)
            file.seek(valid_len)
            tail = file.read()
        if (last := read_result(tail)) is not None:
            self._add(last)
            self._file.write(b"\n")
        elif TORN_START.startswith(tail[: len(TORN_START)]):
            self._file.truncate(valid_len)
        else:
            raise self._not_ours("its last line")

    def _read(self, file: BinaryIO) -> int:
        """Take in all lines that have an end; the offset behind them."""
        valid_len = 0
        number = 0
        while (line := file.readline(MAX_RESULT_BYTES)).endswith(b"\n"):
            number += 1
            if (result := read_result(line)) is None:
                raise self._not_ours(f"line {number}")
            self._add(result)
            valid_len += len(line)
        if len(line) == MAX_RESULT_BYTES:
            raise self._not_ours(f"line {number + 1}")
        return valid_len

    def _add(self, result: WrittenResult) -> None:
        self.num_failed += result.is_failed
        if result.key is not None:
            self.keys.add(result.key)

    def _not_ours(self, where: str) -> ValueError:
        return ValueError(f"{self._name}: {where} is no batch result; --resume leaves it as it is")


class BatchOutput:
    """The file of results and the file of failures, which may be the same one.

    `done` are the keys in both, `num_failed` counts failures old and new.
    """

    def __init__(self, *, results: ResultFile, failures: ResultFile) -> None:
        self._results, self._failures = results, failures
        self.done = results.keys | failures.keys
        self.num_written = 0
        self.num_failed = sum(file.num_failed for file in {results, failures})

    def write(self, result: LineResult) -> None:
        """Write one result to the file it belongs to.

        Raises:
            ValueError: the file system refuses it.
        """
        is_failed = result.error is not None
        (self._failures if is_failed else self._results).write(result)
        self.num_written += 1
        self.num_failed += is_failed


def read_result(line: bytes) -> WrittenResult | None:
    """`line` as a result, None if it is no whole one."""
    try:
        return msgspec.json.decode(line, type=WrittenResult)
    except (msgspec.DecodeError, RecursionError):
        return None


def check_paths(source: Path, targets: Sequence[tuple[str, Path]]) -> None:
    """Refuse files that would overwrite each other; `targets` are flags and their paths.

    Raises:
        ValueError: names the flag.
    """
    if not source.is_file():
        raise ValueError(f"-i must be a file of JSON lines, got {source}")
    taken = [("-i", source)]
    for flag, path in targets:
        for other_flag, other in taken:
            if is_same_file(path, other):
                raise ValueError(f"{flag} {path} is the same file as {other_flag} {other}")
        taken.append((flag, path))


def is_same_file(path: Path, other: Path) -> bool:
    """Whether both names lead to one file, through links too; the files need not exist."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()
