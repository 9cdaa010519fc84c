"""The flags that each command has, and the refusals of those of speculation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from server.cli import (
    EMBEDDED_MODEL,
    add_batch_flags,
    add_bench_flags,
    add_serve_flags,
    build_parser,
    engine_config,
    main,
)

# What scripts rely on: a flag is renamed or removed only with a note in the changelog.
ENGINE_FLAGS = """
--model-path --load-format --dtype --max-model-len --device --num-threads --compile --cuda-graphs
--compile-cache --attention-backend --tensor-parallel-size --state-dtype --page-size
--max-kv-tokens --memory-ratio --max-running-requests --max-queued-requests --max-prefill-tokens
--overlap --speculative-algorithm --spec-algo --speculative-num-steps --spec-num-steps
--speculative-draft-model-path --spec-draft-model --speculative-ngram-min-match-window-size
--speculative-ngram-max-match-window-size --check-integrity --seed
"""
SERVE_FLAGS = "--host --port --served-model-name --api-key --max-body-bytes"
BATCH_FLAGS = """
-i --input -o --output --error-file --resume --strict --served-model-name --progress
"""
BENCH_FLAGS = """
--synthetic-acceptance --base-url --model --api-key --prompt-tokens --output-tokens --prompt-seed
--concurrency --num-requests --ignore-eos --no-ignore-eos --results --geometry
"""
SPEC = ("--speculative-algorithm", "ngram")
SHORTEST, LONGEST = (f"--speculative-ngram-{end}-match-window-size" for end in ("min", "max"))
COMMANDS = {"serve": [], "batch": ["-i", "in", "-o", "out"], "bench": []}


@pytest.mark.parametrize(
    ("add_flags", "own"),
    [
        (add_serve_flags, SERVE_FLAGS),
        (add_batch_flags, BATCH_FLAGS),
        (add_bench_flags, BENCH_FLAGS),
    ],
    ids=["serve", "batch", "bench"],
)
def test_flags_of_a_command(add_flags: Callable[[argparse.ArgumentParser], None], own: str) -> None:
    """S1, V1: every name of every flag; --synthetic-acceptance only for speed tests.

    Oracle: the lists above.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    names = [name for action in parser._actions for name in action.option_strings]
    assert sorted(names) == sorted(f"{ENGINE_FLAGS} {own}".split())


@pytest.mark.parametrize("command", COMMANDS)
def test_short_and_long_names_mean_the_same(command: str) -> None:
    """V1: each flag of speculation and its alias. Oracle: the options, written out."""
    expected = EngineConfig(
        model_path=str(EMBEDDED_MODEL),
        speculative_algorithm="my.drafts:Mine",
        speculative_num_steps=5,
        speculative_draft_model_path="/drafts",
    )
    for names in (
        ("--speculative-algorithm", "--speculative-num-steps", "--speculative-draft-model-path"),
        ("--spec-algo", "--spec-num-steps", "--spec-draft-model"),
    ):
        values = ("my.drafts:Mine", "5", "/drafts")
        given = [word for pair in zip(names, values, strict=True) for word in pair]
        flags = build_parser().parse_args([command, *COMMANDS[command], *given])
        assert engine_config(flags) == expected


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is not refused fails at once, where it would serve until it is stopped."""

    def run(*arguments: object) -> int:
        raise AssertionError("not refused")

    for name in ("run_serve", "run_batch_command", "run_bench_command"):
        monkeypatch.setattr(f"server.cli.{name}", run)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--spec-num-steps", "3"], "--speculative-num-steps needs a draft method"),
        (["--spec-draft-model", "/d"], "--speculative-draft-model-path needs a draft method"),
        ([*SPEC, "--spec-num-steps", "0"], "--speculative-num-steps must be in [1, 7], got 0"),
        ([*SPEC, "--spec-num-steps", "8"], "--speculative-num-steps must be in [1, 7], got 8"),
        (
            ["--spec-algo", "stub", LONGEST, "4"],
            f"{LONGEST} needs --speculative-algorithm ngram: add",
        ),
        ([*SPEC, LONGEST, "0"], f"{LONGEST} must be in [1, 64], got 0"),
        ([*SPEC, SHORTEST, "9"], f"{SHORTEST} must be in [1, 8] with {LONGEST} 8, got 9"),
        ([*SPEC, "--overlap", "on"], "--overlap on does not go together with --speculative-algo"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is not supported: accepted is"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size 0 is not supported: accepted is"),
        (["--attention-backend", "foo"], "--attention-backend must be auto, one of torch, triton,"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_refusals_are_one_line(
    command: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """V16, C-L7: the line names the flag and what is accepted. Oracle: its words, exit code 2."""
    assert main([command, *COMMANDS[command], *flags]) == 2
    check_one_line(capsys, said)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", ["serve", "batch"])
def test_only_speed_tests_invent_acceptance(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """V16, issue 5: outputs would mean nothing. Oracle: exit code 2; bench knows the flag."""
    made_up = [*SPEC, "--synthetic-acceptance", "2.5"]
    assert main([command, *COMMANDS[command], *made_up]) == 2
    check_one_line(capsys, "unrecognized arguments: --synthetic-acceptance")
    config = engine_config(build_parser().parse_args(["bench", *made_up]))
    assert config.synthetic_acceptance == 2.5
    assert main(["bench", *SPEC, "--synthetic-acceptance", "4.5"]) == 2
    check_one_line(capsys, "--synthetic-acceptance must be in [1, 4]")
    assert main(["bench", "--synthetic-acceptance", "2"]) == 2
    check_one_line(capsys, "--synthetic-acceptance needs a draft method")


def test_an_unknown_draft_method_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """V16, V4: only the engine process knows the names, and its refusal is the command's.

    Oracle: exit code 2, a line with the flag and the names of spec/registry.py.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["serve", "--port", "0", "--device", "cpu", "--spec-algo", "oracle"]) == 2
    check_one_line(
        capfd,
        "--speculative-algorithm oracle: no such draft method; accepted: mtp, ngram, stub, or mod",
    )


def check_one_line(capture: pytest.CaptureFixture[str], said: str) -> None:
    """Assert that stderr is one line of the command's own, beside what it logs."""
    output = capture.readouterr()
    assert output.out == ""
    [line] = [line for line in output.err.splitlines() if " INFO " not in line]
    assert line.startswith("deltaloom: ") and said in line
