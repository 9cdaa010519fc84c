"""Runs an OpenAI batch file through an engine; each line gets the answer HTTP would give it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from engine.client import EngineClient, EngineDeadError
from engine.config import EngineConfig
from engine.worker_client import start_worker
from server.batch.engine import PacedClient
from server.batch.lines import check_batch, count_lines, read_batch
from server.batch.results import BatchOutput, ResultFile, check_paths
from server.batch.run import BatchProgress, BatchRun
from server.metrics import ServerMetrics
from server.serve import StartEngine
from server.service.served_model import FrontEnd, ServedModel, check_checkpoint, load_front_end

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_SOME_FAILED, EXIT_NOT_RUN = 0, 1, 2
EXIT_SIGNAL_BASE = 128
# Lines that are prepared while every place in the engine is taken.
NUM_LINES_AHEAD = 16


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What `deltaloom batch` was asked for. Without an error file, failures go to `output`."""

    engine: EngineConfig
    names: tuple[str, ...]
    input: Path
    output: Path
    error_file: Path | None = None
    is_resumed: bool = False
    is_strict: bool = False
    has_progress: bool = False


def run_batch(options: BatchOptions, start_engine: StartEngine = start_worker) -> int:
    """Run the file: 0 all lines succeeded, 1 some failed, 2 the engine died, 128 + a signal.

    On a resumed batch, failures that are already written count as well.

    Raises:
        ValueError: an option, a file or the checkpoint cannot be used; the message says which.
    """
    targets = [("-o", options.output)]
    if options.error_file is not None:
        targets.append(("--error-file", options.error_file))
    check_paths(options.input, targets)
    if options.is_strict:
        check_batch(options.input)
    folder = Path(options.engine.model_path)
    check_checkpoint(folder)
    front_end = load_front_end(folder)
    with ExitStack() as stack:
        files = [
            stack.enter_context(ResultFile(path, flag, is_resumed=options.is_resumed))
            for flag, path in targets
        ]
        output = BatchOutput(results=files[0], failures=files[-1])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_until_signal(options, front_end, output, start_engine))


async def run_until_signal(
    options: BatchOptions, front_end: FrontEnd, output: BatchOutput, start_engine: StartEngine
) -> int:
    """Start an engine and run the lines; stops early for a signal or a dead engine."""
    with cancel_on_signals() as caught:
        try:
            client = await start_engine(options.engine)
            try:
                await run_lines(options, front_end, output, client)
            finally:
                await client.close()
        except asyncio.CancelledError:
            if not caught:
                raise
            logger.warning("stopped by a signal; --resume goes on from here")
            return EXIT_SIGNAL_BASE + caught[0]
        except EngineDeadError as error:
            logger.error("%s; --resume goes on from here", error)
            return EXIT_NOT_RUN
    return EXIT_SOME_FAILED if output.num_failed else EXIT_OK


async def run_lines(
    options: BatchOptions, front_end: FrontEnd, output: BatchOutput, client: EngineClient
) -> None:
    """Run every line that has no result yet."""
    num_open = min(
        client.info.max_running_requests + NUM_LINES_AHEAD, options.engine.max_queued_requests
    )
    paced = PacedClient(client, num_open)
    name = options.names[0]
    model = ServedModel(
        client=paced,
        front_end=front_end,
        names=options.names,
        root=name,
        metrics=ServerMetrics(name, client.info),
    )
    num_done = len(output.done)
    with BatchProgress(
        total=count_lines(options.input), num_done=num_done, is_shown=options.has_progress
    ) as progress:
        run = BatchRun(model, read_batch(options.input), output, progress)
        await run.run(num_open, lambda: paced.num_tokens)
        rate = paced.num_tokens / progress.elapsed_s
    logger.info(
        "%d lines run, %d done before, %d failed in all; %d tokens, %.0f tokens/s",
        output.num_written,
        num_done,
        output.num_failed,
        paced.num_tokens,
        rate,
    )


@contextmanager
def cancel_on_signals() -> Iterator[list[int]]:
    """SIGTERM and SIGINT cancel the current task; gives the list of those that came."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        yield caught
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
