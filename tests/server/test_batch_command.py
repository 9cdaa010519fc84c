"""The flags of `deltaloom batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from server.cli import add_batch_flags, main
from tests.server.batch_files import dump, text_line

MAX_FLAGS = 40


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-i", "in"], "-o"),
        (["-o", "out"], "-i"),
        (["-i", "none", "-o", "out"], "-i"),
        (["-i", "in", "-o", "in"], "same file"),
        (["-i", "in", "-o", "out", "--error-file", "out"], "--error-file"),
        (["-i", "in", "-o", "full"], "--resume"),
        (["-i", "in", "-o", "full", "--resume"], "full: line 1"),
        (["-i", "in", "-o", "out", "--strict"], "Line 2"),
        (["-i", "in", "-o", "out", "--progress", "maybe"], "--progress"),
        (["-i", "in", "-o", "out", "--served-model-name", "a,,b"], "--served-model-name"),
        (["-i", "in", "-o", "out", "--model-path", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_user_errors_are_one_line(
    argv: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """S5: what cannot be used is one line on stderr that names it, and exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    Path("in").write_bytes(dump(text_line("a")) + b"\nbad\n")
    Path("full").write_bytes(b"precious\n")
    assert main(["batch", *argv]) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert said in output.err
    assert Path("full").read_bytes() == b"precious\n"


def test_flags_stay_within_the_budget() -> None:
    """S5: the house rule of at most 40 flags, and help for each."""
    parser = argparse.ArgumentParser(add_help=False)
    add_batch_flags(parser)
    assert len(parser._actions) <= MAX_FLAGS
    assert all(action.help for action in parser._actions)
