"""The `deltaloom` command. User errors are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from engine.config import EngineConfig
from engine.plan import check_options
from engine.version import __version__
from server.app import DEFAULT_MAX_BODY_BYTES
from server.batch.command import add_batch_options, run_batch_command
from server.bench.command import add_bench_options, run_bench_command
from server.serve import ServeOptions, run_serve

EMBEDDED_MODEL = Path(__file__).parent / "embedded"
EMBEDDED_NAME = "gander-12m"
MAX_PORT = 65535
EXIT_USER_ERROR = 2


class UsageError(ValueError):
    """The command line cannot be understood."""


class Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage and exiting."""

    def error(self, message: str) -> typing.NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Command:
    """One subcommand: its flags, and what to do with them; the result is the exit code."""

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_engine_flags(parser: argparse.ArgumentParser, *, has_speed_tests: bool = False) -> None:
    """One flag per field of `EngineConfig`, in its groups; some only with `has_speed_tests`."""
    types = typing.get_type_hints(EngineConfig)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in dataclasses.fields(EngineConfig):
        if option.metadata["is_for_speed_tests"] and not has_speed_tests:
            continue
        name = option.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        kinds = [kind for kind in typing.get_args(types[option.name]) if kind is not NoneType]
        default = str(EMBEDDED_MODEL) if option.name == "model_path" else option.default
        shown = "" if default is None else " (default: %(default)s)"
        groups[name].add_argument(
            "--" + option.name.replace("_", "-"),
            *option.metadata["aliases"],
            dest=option.name,
            type=kinds[0] if kinds else types[option.name],
            default=default,
            choices=option.metadata["choices"] or None,
            help=option.metadata["help"] + shown,
        )


def engine_config(flags: argparse.Namespace) -> EngineConfig:
    """The engine options among the parsed flags.

    Raises:
        ValueError: a value that no model or machine could make right.
    """
    given = vars(flags)
    config = EngineConfig(
        **{
            option.name: given[option.name]
            for option in dataclasses.fields(EngineConfig)
            if option.name in given
        }
    )
    check_options(config)
    return config


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `deltaloom serve`."""
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        metavar="NAME[,NAME]",
        help="names that requests may use, the first is shown (default: the folder's name)",
    )
    group.add_argument("--api-key", help="requests must bring this key (default: none)")
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=DEFAULT_MAX_BODY_BYTES,
        help="largest request body (default: %(default)s)",
    )


def serve_command(flags: argparse.Namespace) -> int:
    """Run the server with the parsed flags.

    Raises:
        ValueError: a flag's value cannot be used.
    """
    if not 0 <= flags.port <= MAX_PORT:
        raise ValueError(f"--port must be in [0, {MAX_PORT}], got {flags.port}")
    if flags.max_body_bytes < 1:
        raise ValueError(f"--max-body-bytes must be at least 1, got {flags.max_body_bytes}")
    if flags.api_key == "":
        raise ValueError("--api-key must not be empty")
    return run_serve(
        ServeOptions(
            engine=engine_config(flags),
            names=served_names(flags.served_model_name, Path(flags.model_path)),
            host=flags.host,
            port=flags.port,
            api_key=flags.api_key,
            max_body_bytes=flags.max_body_bytes,
        )
    )


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `deltaloom batch`."""
    add_engine_flags(parser)
    add_batch_options(parser)


def batch_command(flags: argparse.Namespace) -> int:
    """Run a batch file with the parsed flags.

    Raises:
        ValueError: a flag's value or a file cannot be used.
    """
    names = served_names(flags.served_model_name, Path(flags.model_path))
    return run_batch_command(flags, engine_config(flags), names)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `deltaloom bench`."""
    add_engine_flags(parser, has_speed_tests=True)
    add_bench_options(parser)


def bench_command(flags: argparse.Namespace) -> int:
    """Measure with the parsed flags.

    Raises:
        ValueError: a flag's value cannot be used, or a request failed.
    """
    name = served_names(None, Path(flags.model_path))[0]
    return run_bench_command(flags, engine_config(flags), name, sys.argv[1:])


def served_names(flag: str | None, model_path: Path) -> tuple[str, ...]:
    """The names of the served model.

    Raises:
        ValueError: a name is empty.
    """
    folder = model_path.resolve()
    if flag is None:
        return (EMBEDDED_NAME if folder == EMBEDDED_MODEL.resolve() else folder.name,)
    names = tuple(name.strip() for name in flag.split(","))
    if not all(names):
        raise ValueError(f"--served-model-name must be names joined by commas, got {flag!r}")
    return names


COMMANDS = (
    Command("serve", "answer OpenAI requests over HTTP", add_serve_flags, serve_command),
    Command("batch", "run a file of requests", add_batch_flags, batch_command),
    Command("bench", "measure speed, of an engine or an endpoint", add_bench_flags, bench_command),
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="deltaloom", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, allow_abbrev=False)
        command.add_flags(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        flags = build_parser().parse_args(argv)
        exit_code: int = flags.run(flags)
    except ValueError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"deltaloom: {message}\n")
        return EXIT_USER_ERROR
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
