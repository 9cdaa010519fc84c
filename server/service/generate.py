"""Runs the choices of one API request on the engine and merges what they give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from engine.client import EngineClient, EngineDeadError, QueueFullError
from engine.request import FinishReason, NewRequest, RequestUpdate
from engine.tokens import Tokenizer
from server.errors import BadRequestError, InternalError, engine_error
from server.metrics import RequestTimer, ServerMetrics
from server.service.text import ChoiceDelta, ChoiceText, ChoiceTokens

Deltas = AsyncGenerator[ChoiceDelta, None]


class ChoiceRunner:
    """Runs requests on one engine; closing the generator it gives aborts them."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, metrics: ServerMetrics
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics

    def run(self, requests: Sequence[NewRequest]) -> Deltas:
        """The deltas of all requests as they come; `index` is the place in `requests`.

        No more of them are with the engine at a time than it runs together, so that one call
        with many prompts does not fill the queue.

        Raises:
            ApiError: the engine refused or failed one of them; the others are aborted.
        """
        choices = [
            self._run_one(index, request, self._metrics.start_request())
            for index, request in enumerate(requests)
        ]
        if len(choices) == 1:
            return choices[0]
        return merge(choices, max_open=self._client.info.max_running_requests)

    async def _run_one(self, index: int, request: NewRequest, timer: RequestTimer) -> Deltas:
        reader = (
            ChoiceTokens(index)
            if self._tokenizer is None
            else ChoiceText(index, request, self._tokenizer)
        )
        updates = self._client.generate(request)
        assert isinstance(updates, AsyncGenerator)
        try:
            async with aclosing(updates):
                async for update in updates:
                    timer.observe(update)
                    raise_for_failure(update)
                    yield reader.push(update)
                    if update.finish_reason is not None:
                        return
        except (QueueFullError, EngineDeadError) as error:
            timer.end(FinishReason.ERROR)
            raise engine_error(error) from error
        finally:
            timer.end(FinishReason.ABORT)
        raise InternalError("The engine ended the request without a result.")


def raise_for_failure(update: RequestUpdate) -> None:
    """Raise ApiError if the update says that the request failed."""
    if update.finish_reason == FinishReason.ERROR:
        message = update.error or "The request failed."
        if update.is_user_error:
            raise BadRequestError(message)
        raise InternalError(message, is_final=True)
    if update.finish_reason == FinishReason.ABORT:
        raise InternalError("The request was aborted.")


async def merge(choices: Sequence[Deltas], *, max_open: int) -> Deltas:
    """The items of all generators in the order in which they come, `max_open` running at once.

    The first exception ends all of them; so does closing this generator.
    """
    arrived: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()
    free = asyncio.Semaphore(max_open)

    async def drain(choice: Deltas) -> None:
        try:
            async with free, aclosing(choice):
                async for delta in choice:
                    arrived.put_nowait(delta)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(drain(choice)) for choice in choices]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def join_deltas(deltas: Deltas, num_choices: int) -> list[ChoiceDelta]:
    """Run to the end and join what belongs to each choice into one delta."""
    parts: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            parts[delta.index].append(delta)
    return [
        ChoiceDelta(
            index=index,
            text="".join(part.text for part in choice),
            token_ids=[token_id for part in choice for token_id in part.token_ids],
            placed=[token for part in choice for token in part.placed],
            prompt_logprobs=choice[0].prompt_logprobs,
            finish_reason=choice[-1].finish_reason,
            num_drafted=choice[-1].num_drafted,
            num_accepted=choice[-1].num_accepted,
        )
        for index, choice in enumerate(parts)
    ]
