"""Measuring an endpoint: what is sent, and how streams of different servers are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from random import Random

import httpx
import pytest
from starlette.types import ASGIApp

from server.bench.endpoint import (
    EndpointTarget,
    Event,
    EventChoice,
    EventDelta,
    EventUsage,
    StreamClock,
    first_model,
)
from server.bench.load import RequestFailedError, RequestShape
from tests.server.live_server import live_server
from tests.server.stub_engine import StubEngine

SHAPE = RequestShape(num_prompt_tokens=40, num_output_tokens=5, ignore_eos=True)
TEXT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"

Handler = Callable[[httpx.Request], httpx.Response]


class Parts(httpx.AsyncByteStream):
    """A body in pieces."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def client_of(handler: Handler) -> httpx.AsyncClient:
    """A client whose requests `handler` answers."""
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test/v1")


async def measure(*parts: bytes, status: int = 200) -> tuple[int, int]:
    """Prompt and output tokens of one request that is answered with `parts`."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=Parts(*parts))

    async with client_of(answer) as http:
        found = await EndpointTarget(http, "m", SHAPE).measure(Random(1))
    assert found.started_s <= found.first_token_s <= found.last_token_s
    return found.num_prompt_tokens, found.num_output_tokens


async def test_against_our_server(app: ASGIApp, engine: StubEngine) -> None:
    """S7: a measured request reaches the engine with the lengths asked for.

    Oracle: the requests in the stub engine.
    """
    engine.reply = lambda request: engine.tokenizer.encode(  # type: ignore[union-attr]
        "one two three four five six", parse_special=False, add_special_tokens=False
    )
    async with (
        live_server(app) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}/v1") as http,
    ):
        assert await first_model(http) == "gander-12m"
        target = EndpointTarget(http, "gander-12m", SHAPE)
        await target.calibrate(Random(0))
        engine.requests.clear()
        traces = [await target.measure(Random(number)) for number in range(3)]
    prompts = [tuple(request.prompt_token_ids) for request in engine.requests]
    assert len(set(prompts)) == 3
    for found, request in zip(traces, engine.requests, strict=True):
        assert found.num_prompt_tokens == len(request.prompt_token_ids)
        assert abs(found.num_prompt_tokens - 40) <= 4
        assert found.num_output_tokens == 5
        assert (request.params.max_tokens, request.params.ignore_eos) == (5, True)
        assert request.params.temperature == 0


@pytest.mark.parametrize("is_sent", [True, False])
async def test_what_is_sent(is_sent: bool) -> None:
    """S7: ignore_eos, which is no field of OpenAI's, is sent only if it is asked for."""
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        assert request.url == "http://test/v1/chat/completions"
        return httpx.Response(200, stream=Parts(TEXT, FINISH, USAGE, DONE))

    shape = RequestShape(num_prompt_tokens=7, num_output_tokens=4, ignore_eos=is_sent)
    async with client_of(answer) as http:
        await EndpointTarget(http, "m", shape).measure(Random(1))
    (body,) = bodies
    assert body.pop("ignore_eos", False) is is_sent
    (message,) = body.pop("messages")
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 7
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        ([TEXT, FINISH, USAGE, DONE], (9, 4)),
        ([TEXT, TEXT, TEXT, FINISH, DONE], (0, 3)),
        ([TEXT, FINISH, USAGE], (9, 4)),
        ([(TEXT + FINISH + USAGE + DONE).replace(b"\n", b"\r\n")], (9, 4)),
        ([bytes([byte]) for byte in TEXT + FINISH + USAGE + DONE], (9, 4)),
        ([b": keep-alive\n\nevent: x\nid: 1\n", TEXT, FINISH, DONE], (0, 1)),
        ([TEXT.replace(b'"a"', '"\u2028"'.encode()), FINISH, DONE], (0, 1)),
        ([TEXT.replace(b"content", b"reasoning"), FINISH, DONE], (0, 1)),
        ([TEXT.replace(b"content", b"reasoning_content"), FINISH, DONE], (0, 1)),
    ],
)
async def test_streams_of_other_servers(parts: list[bytes], counts: tuple[int, int]) -> None:
    """S7: usage or none, any cut, line ends, comments, reasoning. Oracle: counted by hand."""
    assert await measure(*parts) == counts


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ([b'{"error": {"message": "too busy"}}'], 503, "503.*too busy"),
        ([b"x" * 9999], 400, "400: x{500}…$"),
        ([TEXT, b'data: {"error": {"message": "broken"}}\n\n', DONE], 200, "broken"),
        ([TEXT], 200, "ended before"),
        ([TEXT, TEXT[:20]], 200, "ended before"),
        ([b"data: {\n\n"], 200, "cannot be read"),
        ([FINISH, USAGE, DONE], 200, "no text"),
        ([b"data: " + b"x" * (17 << 20)], 200, "longer than"),
    ],
)
async def test_failures_are_no_measurement(parts: list[bytes], status: int, said: str) -> None:
    """S7: a refusal, an error event, a broken stream: each is said, none is counted."""
    with pytest.raises(RequestFailedError, match=said):
        await measure(*parts, status=status)


async def test_no_connection() -> None:
    """S7: an endpoint that is not there is named."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client_of(refuse) as http:
        with pytest.raises(RequestFailedError, match="http://test/v1/: refused"):
            await EndpointTarget(http, "m", SHAPE).measure(Random(1))
        with pytest.raises(RequestFailedError, match="http://test/v1/: refused"):
            await first_model(http)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": {}}', "401"),
        (200, b'{"data": []}', "--model"),
        (200, b"<html>", "JSON"),
        (200, b'{"data": [{"name": "x"}]}', "id"),
    ],
)
async def test_no_model(status: int, body: bytes, said: str) -> None:
    """S7: without --model the endpoint must list one."""
    async with client_of(lambda request: httpx.Response(status, content=body)) as http:
        with pytest.raises(RequestFailedError, match=said):
            await first_model(http)


def test_times_of_a_stream() -> None:
    """S7: a chunk that only has the role is no token, and the finish belongs to the last one."""
    clock = StreamClock(10.0)
    text = EventChoice(EventDelta(content="x"))
    clock.observe(Event([EventChoice(EventDelta(content=""))]), 11.0)
    clock.observe(Event([text]), 12.0)
    clock.observe(Event([text]), 14.0)
    clock.observe(Event([EventChoice(finish_reason="")]), 14.5)
    clock.observe(Event([EventChoice(finish_reason="stop")]), 15.0)
    clock.observe(Event([], EventUsage(7, 4)), 20.0)
    found = clock.trace()
    assert (found.ttft_s, found.e2e_s, found.tpot_s) == (2.0, 5.0, 1.0)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (7, 4)
