"""Reading a batch file: one request per line, checked as far as the line alone allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from server.app import DEFAULT_MAX_BODY_BYTES
from server.errors import BadRequestError
from server.service.request_schema import (
    ChatRequest,
    CompletionRequest,
    RequestReader,
    parse_json_object,
)

MAX_LINE_BYTES = DEFAULT_MAX_BODY_BYTES
MAX_CUSTOM_ID_CHARS = 512
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

BODY_SHAPES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}

# What a result is known by when a batch is resumed: its custom_id, or the number of a line that
# has no custom_id of its own.
ResultKey = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """One line that can be run. `number` counts the file's lines from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def key(self) -> ResultKey:
        """The custom_id."""
        return self.custom_id


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """One line that cannot be run. `is_repeated`: its custom_id belongs to an earlier line."""

    number: int
    custom_id: str | None
    error: BadRequestError
    is_repeated: bool = False

    @property
    def key(self) -> ResultKey:
        """The custom_id if it is this line's alone, else the line's number."""
        return self.number if self.custom_id is None or self.is_repeated else self.custom_id


def read_batch(path: Path) -> Iterator[BatchRequest | BadLine]:
    """The lines of a batch file that are not blank, read one at a time.

    Raises:
        ValueError: the file cannot be read.
    """
    seen: set[str] = set()
    for number, data in read_lines(path):
        line = parse_line(number, data)
        custom_id = line.custom_id
        if custom_id in seen:
            message = f"custom_id {custom_id!r} is already used by an earlier line."
            error = BadRequestError(f"Line {number}: {message}", "custom_id")
            line = BadLine(number=number, custom_id=custom_id, error=error, is_repeated=True)
        elif custom_id is not None:
            seen.add(custom_id)
        yield line


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line that is not blank, without a BOM and line ends.

    A line over MAX_LINE_BYTES comes cut to one byte more than that.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        yield from _read_open_file(path)
    except OSError as error:
        raise ValueError(f"-i {path}: {error.strerror}") from error


def _read_open_file(path: Path) -> Iterator[tuple[int, bytes]]:
    max_read_bytes = len(BYTE_ORDER_MARK) + MAX_LINE_BYTES + len(b"\r\n")
    with path.open("rb") as file:
        number = 0
        while data := file.readline(max_read_bytes):
            number += 1
            is_whole = data.endswith(b"\n")
            while not is_whole and (rest := file.readline(max_read_bytes)):
                is_whole = rest.endswith(b"\n")
            if number == 1:
                data = data.removeprefix(BYTE_ORDER_MARK)
            data = data.strip()
            if data:
                yield number, data[: MAX_LINE_BYTES + 1]


def count_lines(path: Path) -> int:
    """How many lines are not blank."""
    return sum(1 for _ in read_lines(path))


def parse_line(number: int, data: bytes) -> BatchRequest | BadLine:
    """Check one line by itself."""
    custom_id = None
    try:
        if len(data) > MAX_LINE_BYTES:
            raise BadRequestError(f"A line must not be longer than {MAX_LINE_BYTES} bytes.")
        fields = parse_json_object(data)
        custom_id = read_custom_id(fields)
        return BatchRequest(
            number=number, custom_id=custom_id, url=read_url(fields), body=read_body(fields)
        )
    except BadRequestError as error:
        return BadLine(
            number=number,
            custom_id=custom_id,
            error=BadRequestError(f"Line {number}: {error}", error.error.param),
        )


def read_custom_id(fields: Mapping[str, Any]) -> str:
    """The line's own name for its request.

    Raises:
        BadRequestError: absent or no usable string.
    """
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadRequestError(
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters.", "custom_id"
        )
    return custom_id


def read_url(fields: Mapping[str, Any]) -> str:
    """The endpoint that the line is for.

    Raises:
        BadRequestError: no such endpoint here, or another method than POST.
    """
    if fields.get("method", "POST") != "POST":
        raise BadRequestError("method must be POST.", "method")
    url = fields.get("url")
    if not isinstance(url, str) or url not in BODY_SHAPES:
        raise BadRequestError(f"url must be one of {', '.join(BODY_SHAPES)}.", "url")
    return url


def read_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request's body.

    Raises:
        BadRequestError: no object, or a body that asks for a stream.
    """
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BadRequestError("body must be a JSON object.", "body")
    if body.get("stream") is True:
        raise BadRequestError("stream must not be true in a batch.", "stream")
    return body


def check_batch(path: Path) -> None:
    """Read the whole file and refuse it for its first bad line.

    Bodies are checked for fields and types; what depends on the model is not.

    Raises:
        ValueError: names the line.
    """
    reader = RequestReader()
    for line in read_batch(path):
        if isinstance(line, BadLine):
            raise ValueError(f"--strict: {line.error}")
        try:
            reader.read(line.body, BODY_SHAPES[line.url])
        except BadRequestError as error:
            raise ValueError(f"--strict: Line {line.number}: {error}") from error
