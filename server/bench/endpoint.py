"""An endpoint of the OpenAI API as something to measure, through streamed chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random
from typing import Any

import httpx
import msgspec

from server.bench.load import RequestFailedError, RequestShape, RequestTrace

MAX_PROBES = 4
MAX_ERROR_CHARS = 500
MAX_EVENT_BYTES = 16 << 20
# Common short words, which most vocabularies hold as one token each.
WORDS = (
    "the", "of", "and", "to", "in", "is", "was", "for", "that", "on", "as", "with", "by", "at",
    "from", "his", "an", "were", "are", "which", "this", "be", "had", "also", "or", "has", "first",
    "their", "one", "its", "new", "after", "but", "who", "not", "they", "two", "her", "she",
    "been", "other", "when", "time", "during", "there", "into", "all", "may", "more", "years",
    "over", "only", "some", "city", "most", "up", "can", "then", "made", "later", "them", "where",
)  # fmt: skip


class EventUsage(msgspec.Struct, frozen=True):
    """The part of `usage` that is counted."""

    prompt_tokens: int
    completion_tokens: int


class EventDelta(msgspec.Struct, frozen=True):
    """The texts a chunk can bring; servers differ in the name of reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether any text came."""
        return bool(self.content or self.reasoning_content or self.reasoning)


class EventChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    delta: EventDelta = EventDelta()
    finish_reason: str | None = None


class Event(msgspec.Struct, frozen=True):
    """One event of a stream, or an error in its place."""

    choices: list[EventChoice] = []
    usage: EventUsage | None = None
    error: Any = None


class EndpointTarget:
    """An endpoint of the OpenAI API; prompts are random words, as many as `calibrate` found."""

    def __init__(self, http: httpx.AsyncClient, model: str, shape: RequestShape) -> None:
        self._http = http
        self._model = model
        self._shape = shape
        self._num_words = shape.num_prompt_tokens

    async def calibrate(self, random: Random) -> None:
        """Find the number of words whose prompt has about the wanted number of tokens.

        Raises:
            RequestFailedError: a probe failed.
        """
        wanted = self._shape.num_prompt_tokens
        for _ in range(MAX_PROBES):
            trace = (await self._run(random, num_output_tokens=1)).trace()
            missing = wanted - trace.num_prompt_tokens
            # Some servers count no prompt tokens, and a chat layout can be longer than asked.
            if trace.num_prompt_tokens == 0 or missing == 0 or self._num_words + missing < 1:
                return
            self._num_words += missing

    async def measure(self, random: Random) -> RequestTrace:
        """See `BenchTarget.measure`."""
        clock = await self._run(random, num_output_tokens=self._shape.num_output_tokens)
        if not clock.has_text:
            raise RequestFailedError("an answer has no text, so its first token has no time")
        return clock.trace()

    async def _run(self, random: Random, *, num_output_tokens: int) -> StreamClock:
        body = {
            "model": self._model,
            "messages": [
                {"role": "user", "content": " ".join(random.choices(WORDS, k=self._num_words))}
            ],
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._shape.ignore_eos:
            body["ignore_eos"] = True
        clock = StreamClock(time.monotonic())
        try:
            async with self._http.stream("POST", "chat/completions", json=body) as response:
                await check_status(response)
                async with aclosing(read_events(response)) as events:
                    async for event in events:
                        clock.observe(event, time.monotonic())
        except httpx.HTTPError as error:
            raise RequestFailedError(f"{self._http.base_url}: {describe(error)}") from error
        return clock


class StreamClock:
    """Keeps the times of one stream that was asked for at `started_s`."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._num_texts = 0
        self._is_finished = False
        self._usage: EventUsage | None = None

    @property
    def has_text(self) -> bool:
        """Whether any text has come."""
        return self._num_texts > 0

    def observe(self, event: Event, now_s: float) -> None:
        """Take in one event that came at `now_s`.

        Raises:
            RequestFailedError: the event is an error.
        """
        if event.error is not None:
            raise RequestFailedError(f"the stream ended with {shorten(str(event.error))}")
        self._usage = event.usage or self._usage
        for choice in event.choices:
            if choice.delta.has_text:
                self._num_texts += 1
                self._first_s = now_s if self._first_s is None else self._first_s
            # The finish comes with the last token, which may have no text.
            if choice.delta.has_text or choice.finish_reason:
                self._last_s = now_s
            self._is_finished |= bool(choice.finish_reason)

    def trace(self) -> RequestTrace:
        """The whole request; without usage every piece of text counts as one token.

        Raises:
            RequestFailedError: the stream broke off.
        """
        if not self._is_finished:
            raise RequestFailedError("the stream ended before the answer did")
        usage = self._usage or EventUsage(0, self._num_texts)
        return RequestTrace(
            started_s=self._started_s,
            first_token_s=self._last_s if self._first_s is None else self._first_s,
            last_token_s=self._last_s,
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
        )


async def check_status(response: httpx.Response) -> None:
    """Raise RequestFailedError, with what the endpoint says, unless the status is 200."""
    if response.status_code != httpx.codes.OK:
        text = (await response.aread()).decode(errors="replace")
        raise RequestFailedError(f"{response.url}: HTTP {response.status_code}: {shorten(text)}")


async def read_events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    """The events of a stream up to [DONE].

    Raises:
        RequestFailedError: an event is no JSON of the expected shape, or has no end.
    """
    held = b""
    async for part in response.aiter_bytes():
        *lines, held = (held + part).split(b"\n")
        if len(held) > MAX_EVENT_BYTES:
            raise RequestFailedError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            name, _, data = line.strip().partition(b":")
            if name != b"data":
                continue
            if data.strip() == b"[DONE]":
                return
            try:
                yield msgspec.json.decode(data, type=Event)
            except msgspec.DecodeError as error:
                raise RequestFailedError(f"an event cannot be read: {error}") from error


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that the endpoint lists.

    Raises:
        RequestFailedError: it lists none.
    """
    try:
        response = await http.get("models")
        await check_status(response)
        listed = msgspec.json.decode(response.content, type=ListedModels)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        raise RequestFailedError(f"{http.base_url}: {describe(error)}") from error
    if not listed.data:
        raise RequestFailedError(f"{http.base_url} lists no model; give --model")
    return listed.data[0].id


class ListedModel(msgspec.Struct, frozen=True):
    """One entry of /v1/models."""

    id: str


class ListedModels(msgspec.Struct, frozen=True):
    """The body of /v1/models."""

    data: list[ListedModel]


def describe(error: Exception) -> str:
    """The error's own words, or its name where it has none."""
    return str(error) or type(error).__name__


def shorten(text: str) -> str:
    """At most MAX_ERROR_CHARS of a text that others wrote."""
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
