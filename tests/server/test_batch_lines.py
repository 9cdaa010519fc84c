"""Damaged batch files: what is damaged fails, and nothing else changes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokens import Tokenizer
from server.batch.lines import BYTE_ORDER_MARK, BadLine, BatchRequest, parse_line, read_batch
from server.batch.results import BatchOutput, ResultFile
from server.batch.run import BatchProgress, BatchRun
from server.metrics import ServerMetrics
from server.service.served_model import FrontEnd, ServedModel
from tests.server.batch_files import chat_line, dump, read_lines, text_line, without_names
from tests.server.stub_engine import StubEngine, reply_with

GOOD = [
    dump(line)
    for line in (
        text_line("number one of the lines", max_tokens=3),
        chat_line("the second of all lines", n=2),
        text_line("then comes another line", prompt=[1, 2, 3], echo=True),
        chat_line("and this is the end ☃", max_tokens=2, logprobs=True),
    )
]
BLANKS = b" \t\n\r\x0b\x0c"


def run_file(data: bytes, tokenizer: Tokenizer, front_end: FrontEnd) -> list[dict[str, Any]]:
    """All results of a batch file, on a fresh stub engine."""

    async def run(folder: Path) -> None:
        engine = StubEngine(tokenizer, reply_with(tokenizer, "The answer is 42."))
        model = ServedModel(
            client=engine,
            front_end=front_end,
            names=("stub",),
            root="stub",
            metrics=ServerMetrics("stub", engine.info),
        )
        (folder / "in").write_bytes(data)
        with (
            ResultFile(folder / "out", "-o", is_resumed=False) as file,
            BatchProgress(total=0, num_done=0, is_shown=False) as progress,
        ):
            output = BatchOutput(results=file, failures=file)
            await BatchRun(model, read_batch(folder / "in"), output, progress).run(3, lambda: 0)

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))
        return read_lines(Path(name) / "out")


def damaged(line: bytes, position: int, num_removed: int, added: bytes) -> bytes:
    """`line` with some bytes replaced."""
    start = position % (len(line) + 1)
    return line[:start] + added + line[start + num_removed :]


@pytest.fixture(scope="module")
def undamaged(tokenizer: Tokenizer, front_end: FrontEnd) -> dict[str, Any]:
    """The bodies of all answers to GOOD, by custom_id."""
    return {
        result["custom_id"]: without_names(result["response"]["body"])
        for result in run_file(b"\n".join(GOOD), tokenizer, front_end)
    }


@settings(max_examples=100, deadline=None)
@given(
    which=st.integers(0, len(GOOD) - 1),
    position=st.integers(0, 1000),
    num_removed=st.integers(0, 300),
    added=st.one_of(st.binary(max_size=4), st.sampled_from([b"\n", b"\xef\xbb\xbf", b"\0", b"}"])),
)
def test_damage_stays_in_its_line(
    tokenizer: Tokenizer,
    front_end: FrontEnd,
    undamaged: dict[str, Any],
    which: int,
    position: int,
    num_removed: int,
    added: bytes,
) -> None:
    """S5: every line that is not blank has one result, and those of whole lines are unchanged.

    Oracle: the same file without the damage.
    """
    lines = list(GOOD)
    lines[which] = damaged(lines[which], position, num_removed, added)
    data = b"\n".join(lines)
    results = run_file(data, tokenizer, front_end)
    kept = data.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    assert len(results) == sum(1 for line in kept if line.strip(BLANKS))
    for line in GOOD[:which] + GOOD[which + 1 :]:
        custom_id = parse_line(1, line).custom_id
        (result,) = [result for result in results if result["custom_id"] == custom_id]
        assert without_names(result["response"]["body"]) == undamaged[custom_id]
    for result in results:
        assert (result["response"]["status_code"] == 200) == (result["error"] is None)


def test_keys_of_lines(tmp_path: Path) -> None:
    """S5: a line is known by its custom_id, or by its number where that is not its own."""
    path = tmp_path / "in"
    path.write_bytes(
        b"\n".join((GOOD[0], b"{", GOOD[0], dump(text_line("x", stream=True)), b"", GOOD[1]))
    )
    lines = list(read_batch(path))
    assert [line.key for line in lines] == [
        "number one of the lines",
        2,
        3,
        "x",
        "the second of all lines",
    ]
    kinds = [BatchRequest, BadLine, BadLine, BadLine, BatchRequest]
    assert [type(line) for line in lines] == kinds
    assert [line.number for line in lines] == [1, 2, 3, 4, 6]
