"""`deltaloom batch`: its own flags, and what they ask for."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from engine.config import EngineConfig
from server.batch.job import EXIT_SIGNAL_BASE, BatchOptions, run_batch


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `deltaloom batch` that are no engine options."""
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input", type=Path, required=True, help="requests in OpenAI's batch format, JSONL"
    )
    group.add_argument(
        "-o", "--output", type=Path, required=True, help="results, one JSON line per request"
    )
    group.add_argument(
        "--error-file", type=Path, help="results of failed requests (default: with the others)"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the output of a batch that was stopped; what it has is not run again",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="run nothing if a line is malformed (default: that line fails alone)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME[,NAME]",
        help="names that requests may use (default: the folder's name)",
    )
    group.add_argument(
        "--progress",
        choices=("auto", "on", "off"),
        default="auto",
        help="progress bar on stderr; auto shows it on a terminal (default: %(default)s)",
    )


def run_batch_command(
    flags: argparse.Namespace, engine: EngineConfig, names: tuple[str, ...]
) -> int:
    """Run a batch with the parsed flags; the exit code.

    Raises:
        ValueError: a flag's value or a file cannot be used.
    """
    has_progress = sys.stderr.isatty() if flags.progress == "auto" else flags.progress == "on"
    options = BatchOptions(
        engine=engine,
        names=names,
        input=flags.input,
        output=flags.output,
        error_file=flags.error_file,
        is_resumed=flags.resume,
        is_strict=flags.strict,
        has_progress=has_progress,
    )
    try:
        return run_batch(options)
    except KeyboardInterrupt:
        # Before the engine's start there is nothing to end.
        return EXIT_SIGNAL_BASE + signal.SIGINT
