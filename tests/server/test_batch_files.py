"""Which files the batch command takes, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.batch.results import ResultFile
from tests.server.batch_files import (
    BatchFolder,
    by_id,
    chat_line,
    text_line,
)
from tests.server.stub_engine import StubEngine


@pytest.fixture
def batch(tmp_path: Path, engine: StubEngine) -> BatchFolder:
    """An empty folder and the stub engine."""
    return BatchFolder(tmp_path, engine)


def test_failures_can_go_to_their_own_file(batch: BatchFolder) -> None:
    """S5: --error-file takes all failures and nothing else."""
    batch.write(text_line("good"), b"bad", text_line("worse", n=0))
    assert batch.run(error_file=batch.error_file) == 1
    assert set(by_id(batch.output)) == {"good"}
    assert set(by_id(batch.error_file)) == {None, "worse"}


@pytest.mark.parametrize(
    "line", [b"{", text_line("a"), text_line("x", stream=True), text_line("x", n="2")]
)
def test_strict_refuses_the_whole_file(batch: BatchFolder, line: object) -> None:
    """S5: --strict names the line, starts no engine and touches no file."""
    batch.write(text_line("a"), b"", line)
    with pytest.raises(ValueError, match="--strict: Line 3: "):
        batch.run(is_strict=True)
    assert batch.starts == []
    assert not batch.output.exists()
    batch.write(text_line("a"), chat_line("b"))
    assert batch.run(is_strict=True) == 0


def test_results_never_overwrite_a_file(batch: BatchFolder) -> None:
    """S5: a file with content is refused by name and stays as it is; an empty one is used."""
    batch.write(text_line("a"))
    batch.output.write_bytes(b"precious\n")
    with pytest.raises(ValueError, match=r"-o .*out\.jsonl.*--resume"):
        batch.run()
    with pytest.raises(ValueError, match=r"line 1 is no batch result"):
        batch.run(is_resumed=True)
    batch.output.write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"last line is no batch result"):
        batch.run(is_resumed=True)
    assert batch.output.read_bytes() == b"precious"
    batch.output.write_bytes(b"")
    batch.error_file.write_bytes(b"precious\n")
    with pytest.raises(ValueError, match="--error-file"):
        batch.run(error_file=batch.error_file)
    assert batch.starts == []
    assert batch.run() == 0
    results = batch.output.read_bytes()
    with pytest.raises(ValueError, match="is not empty"):
        batch.run()
    assert batch.output.read_bytes() == results


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link", "dots"])
def test_output_must_not_be_the_input(batch: BatchFolder, kind: str) -> None:
    """S5: refused also where another name leads to the input; --resume makes no difference."""
    batch.write(text_line("a"))
    before = batch.input.read_bytes()
    target = batch.folder / "other.jsonl"
    match kind:
        case "same":
            target = batch.input
        case "symlink":
            target.symlink_to(batch.input)
        case "hard link":
            target.hardlink_to(batch.input)
        case "dots":
            target = batch.folder / ".." / batch.folder.name / "in.jsonl"
    for is_resumed in (False, True):
        with pytest.raises(ValueError, match="same file as -i"):
            batch.run(output=target, is_resumed=is_resumed)
        with pytest.raises(ValueError, match="same file as -i"):
            batch.run(error_file=target, is_resumed=is_resumed)
    with pytest.raises(ValueError, match="same file as -o"):
        batch.run(error_file=batch.output)
    assert batch.input.read_bytes() == before


def test_files_that_cannot_be_used(batch: BatchFolder) -> None:
    """S5: a missing input or folder is one line that names the flag."""
    with pytest.raises(ValueError, match="-i"):
        batch.run()
    batch.write(text_line("a"))
    with pytest.raises(ValueError, match="-i"):
        batch.run(input=batch.folder)
    with pytest.raises(ValueError, match="-o"):
        batch.run(output=batch.folder / "none" / "out.jsonl")
    with pytest.raises(ValueError, match="-o"):
        batch.run(output=batch.folder)


def test_one_output_has_one_writer(batch: BatchFolder) -> None:
    """S5: a second batch on the same output is refused while the first one runs."""
    batch.write(text_line("a"))
    with ResultFile(batch.output, "-o", is_resumed=False):
        for is_resumed in (False, True):
            with pytest.raises(ValueError, match="another batch"):
                batch.run(is_resumed=is_resumed)
    assert batch.run() == 0


def test_a_full_disk_is_one_line(batch: BatchFolder) -> None:
    """S5: a result that cannot be written ends the batch and names the file."""
    batch.write(text_line("a"))
    with pytest.raises(ValueError, match="-o /dev/full: No space left"):
        batch.run(output=Path("/dev/full"))
    assert batch.engine.is_closed
