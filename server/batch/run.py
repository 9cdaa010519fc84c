"""The running of batch lines, several at once, and the bar that shows it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from tqdm import tqdm

from engine.client import EngineDeadError
from server.batch.lines import BadLine, BatchRequest
from server.batch.results import BatchOutput, LineResult, answered, failed
from server.errors import ApiError, InternalError
from server.routes.generate import GenerationService
from server.service.chat import ChatService
from server.service.completions import CompletionService
from server.service.served_model import ServedModel
from server.service.stream import PrimedStream

logger = logging.getLogger(__name__)

REDRAW_S = 0.5

SERVICES: Mapping[str, Callable[[ServedModel], GenerationService]] = {
    "/v1/chat/completions": ChatService,
    "/v1/completions": CompletionService,
}


class BatchProgress:
    """A bar on stderr with tokens per second and the number of failed lines."""

    def __init__(self, *, total: int, num_done: int, is_shown: bool) -> None:
        self._bar = tqdm(
            total=total,
            initial=min(num_done, total),
            unit="line",
            file=sys.stderr,
            disable=not is_shown,
            dynamic_ncols=True,
        )
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    @property
    def elapsed_s(self) -> float:
        """Time since the first line could run; never 0."""
        return max(time.monotonic() - self._started_s, 1e-9)

    def advance(self) -> None:
        """One line more has its result."""
        self._bar.update()

    def show(self, num_tokens: int, num_failed: int) -> None:
        """Redraw with new numbers."""
        rate = num_tokens / self.elapsed_s
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s, {num_failed} failed")


class BatchRun:
    """Gives each line that has no result yet one."""

    def __init__(
        self,
        model: ServedModel,
        lines: Iterator[BatchRequest | BadLine],
        output: BatchOutput,
        progress: BatchProgress,
    ) -> None:
        self._model = model
        # All workers take their lines from this one iterator, so at most one line per worker
        # is in memory.
        self._lines = lines
        self._output = output
        self._progress = progress

    async def run(self, num_workers: int, count_tokens: Callable[[], int]) -> None:
        """Run all lines, `num_workers` at once; the first exception ends all of them.

        Raises:
            EngineDeadError: the engine died; lines that were running have no result.
            ValueError: the input cannot be read or a result cannot be written.
        """
        drawing = asyncio.create_task(self._keep_drawing(count_tokens))
        workers = [asyncio.create_task(self._work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in (drawing, *workers):
                task.cancel()
            await asyncio.gather(drawing, *workers, return_exceptions=True)
            self._progress.show(count_tokens(), self._output.num_failed)

    async def _work(self) -> None:
        for line in self._lines:
            if line.key in self._output.done:
                # Nothing else in this branch lets the other tasks and signals have a turn.
                await asyncio.sleep(0)
                continue
            self._output.write(await self._result(line))
            self._progress.advance()

    async def _result(self, line: BatchRequest | BadLine) -> LineResult:
        if isinstance(line, BadLine):
            await asyncio.sleep(0)
            return failed(line.key, line.custom_id, line.error)
        service = SERVICES[line.url](self._model)
        try:
            body = await service.create(line.body)
        except ApiError as error:
            if not self._model.client.is_alive:
                raise EngineDeadError("the engine has died") from error
            return failed(line.key, line.custom_id, error)
        except Exception:
            logger.exception("line %d ended with an internal error", line.number)
            return failed(line.key, line.custom_id, InternalError())
        assert not isinstance(body, PrimedStream), "read_body refuses stream"
        return answered(line.custom_id, body)

    async def _keep_drawing(self, count_tokens: Callable[[], int]) -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            self._progress.show(count_tokens(), self._output.num_failed)
