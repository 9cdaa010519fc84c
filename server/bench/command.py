"""`deltaloom bench`: its own flags, and what they ask for."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from server.bench.job import BenchOptions, run_bench
from server.bench.load import RequestShape
from server.service.served_model import check_checkpoint

MAX_CONCURRENCY = 4096
EXIT_SIGNAL_BASE = 128
SECRET_FLAG = "--api-key"


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The flags of `deltaloom bench` that are no engine options."""
    group = parser.add_argument_group("endpoint")
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="measure this OpenAI endpoint, such as http://127.0.0.1:8000/v1 "
        "(default: start an engine with the other flags and measure it without a server)",
    )
    group.add_argument("--model", help="model to ask for (default: the endpoint's first)")
    group.add_argument(SECRET_FLAG, help="key to send (default: none)")
    group = parser.add_argument_group("load")
    for name, default, text in (
        ("--prompt-tokens", 128, "tokens per prompt; about as many for an endpoint"),
        ("--output-tokens", 128, "tokens per answer"),
        ("--prompt-seed", 0, "makes the prompts; no two requests of a run have the same"),
    ):
        group.add_argument(name, type=int, default=default, help=f"{text} (default: %(default)s)")
    group.add_argument(
        "--concurrency",
        default="1,16",
        metavar="N[,N]",
        help="requests kept open at once, one level after the other (default: %(default)s)",
    )
    group.add_argument(
        "--num-requests", type=int, help="per level (default: twice the level, at least 8)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on to the last output token; not every endpoint knows this (default: on)",
    )
    group = parser.add_argument_group("results")
    group.add_argument(
        "--results", type=Path, metavar="FILE", help="default: a new file in bench/results"
    )
    group.add_argument(
        "--geometry", help="name of the model's shape in the results (default: the model's name)"
    )


def run_bench_command(
    flags: argparse.Namespace, engine: EngineConfig, engine_name: str, argv: Sequence[str]
) -> int:
    """Measure with the parsed flags; the exit code. `argv` goes into the results file.

    Raises:
        ValueError: a flag's value cannot be used.
    """
    for name in ("prompt_tokens", "output_tokens", "num_requests"):
        value = vars(flags)[name]
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if flags.base_url is not None and not flags.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, got {flags.base_url}")
    if flags.base_url is None and (flags.model is not None or flags.api_key is not None):
        raise ValueError("--model and --api-key need --base-url")
    options = BenchOptions(
        engine=engine,
        engine_name=engine_name,
        geometry=flags.geometry,
        shape=RequestShape(
            num_prompt_tokens=flags.prompt_tokens,
            num_output_tokens=flags.output_tokens,
            ignore_eos=flags.ignore_eos,
        ),
        concurrency=read_concurrency(flags.concurrency),
        num_requests=flags.num_requests,
        prompt_seed=flags.prompt_seed,
        results=flags.results,
        command=shown_command(argv),
        base_url=flags.base_url,
        model=flags.model,
        api_key=flags.api_key,
    )
    if options.base_url is None:
        check_checkpoint(Path(options.engine.model_path))
    # One line per request would drown what is measured.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return run_bench(options)
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT


def read_concurrency(text: str) -> tuple[int, ...]:
    """The levels of load.

    Raises:
        ValueError: no list of counts.
    """
    levels = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_CONCURRENCY for part in levels):
        raise ValueError(
            f"--concurrency must be numbers from 1 to {MAX_CONCURRENCY} joined by commas, "
            f"got {text!r}"
        )
    return tuple(int(part) for part in levels)


def shown_command(argv: Sequence[str]) -> str:
    """The command line as it may be published: without the API key."""
    shown = []
    is_secret = False
    for word in argv:
        if is_secret:
            shown.append("***")
        elif word.startswith(f"{SECRET_FLAG}="):
            shown.append(f"{SECRET_FLAG}=***")
        else:
            shown.append(word)
        is_secret = word == SECRET_FLAG and not is_secret
    return shlex.join(["deltaloom", *shown])
