"""Streams: the bytes on the wire, the official client, disconnects and a dying engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from engine.request import FinishReason, NewRequest, RequestUpdate
from engine.tokens import Tokenizer
from server.errors import ErrorBody, ErrorObject
from server.service import ServedModel
from server.service_chat import ChatService
from server.streaming import encode_event
from tests.server.live_server import RawConnection, live_server, until
from tests.server.stub_engine import StubEngine, reply_with

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def events_of(http: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    """The JSON events of a stream, after a check of its framing."""
    response = await http.post(PATH, json=CHAT | fields | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-1]:
        assert event.startswith(b"data: ")
        assert len(event.decode().splitlines()) == 1
    return [json.loads(event[6:]) for event in events[:-2]]


async def test_chunks(http: httpx.AsyncClient) -> None:
    """S2: facts 1.4, one role chunk, text, one finish chunk with delta {}; rows 1 and 3."""
    events = await events_of(http)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == "The answer is 42."
    for event in events:
        assert set(event) == {
            "id", "object", "created", "model", "choices", "system_fingerprint", "service_tier"
        }  # fmt: skip


async def test_usage(http: httpx.AsyncClient) -> None:
    """S2: rows 1 and 2, no usage for {}; null then one chunk without choices; running usage."""
    for options in ({}, {"include_usage": False}, {"include_obfuscation": False}):
        assert all("usage" not in event for event in await events_of(http, stream_options=options))
    events = await events_of(http, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    whole = (await http.post(PATH, json=CHAT)).json()
    assert events[-1]["usage"] == whole["usage"]
    both = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in await events_of(http, stream_options=both)]
    assert counts == sorted(counts)
    assert counts[-1] == whole["usage"]["completion_tokens"]


async def test_choices(http: httpx.AsyncClient) -> None:
    """S2: facts 1.4, with n choices each index has one role chunk and one finish chunk."""
    events = await events_of(http, n=3)
    for index in range(3):
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [part["delta"].get("role") for part in parts].count("assistant") == 1
        assert parts[0]["delta"]["role"] == "assistant"
        assert [part["finish_reason"] for part in parts].count("stop") == 1
        assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("tokens_per_update", [1, 2, 5])
async def test_stop_prefix_is_never_sent(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer, tokens_per_update: int
) -> None:
    """S3: rows 5, 23, 24 and 25 of facts, held text is sent only if no stop string forms."""
    engine.tokens_per_update = tokens_per_update
    for text, stop, expected in (
        ("Hi\nUser: x", ["\nUser:"], "Hi"),
        ("xab", ["ab", "b"], "x"),
        ("a <e", ["<end>"], "a <e"),
        ("One. Observation: y", ["Observation"], "One. "),
    ):
        engine.reply = reply_with(tokenizer, text)
        events = await events_of(http, stop=stop)
        sent = ""
        for event in events[:-1]:
            sent += event["choices"][0]["delta"]["content"]
            assert expected.startswith(sent)
        assert sent == expected
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=st.text(alphabet="ab🙂é \n\u2028<", min_size=0, max_size=24),
    stop=st.lists(st.text(alphabet="ab🙂é\n", min_size=1, max_size=3), max_size=3),
    cut=st.integers(min_value=1, max_value=60),
    tokens_per_update=st.integers(min_value=1, max_value=4),
)
async def test_stream_equals_whole(
    model: ServedModel,
    engine: StubEngine,
    tokenizer: Tokenizer,
    text: str,
    stop: list[str],
    cut: int,
    tokens_per_update: int,
) -> None:
    """S3: streamed and whole answers are one in text, entries, ids, finish and usage.

    Also bytes of the entries == the content where it holds no U+FFFD.
    """
    engine.reply = reply_with(tokenizer, text)
    engine.tokens_per_update = tokens_per_update
    asked = CHAT | {
        "stop": stop, "logprobs": True, "top_logprobs": 1, "max_tokens": cut,
        "return_token_ids": True,
    }  # fmt: skip
    service = ChatService(model)
    whole: Any = await service.create(asked)
    usage = {"stream_options": {"include_usage": True}, "stream": True}
    chunks: list[Any] = [chunk async for chunk in await service.create(asked | usage)]
    [choice] = whole.choices
    parts = [part for chunk in chunks for part in chunk.choices]
    contents = parts[1:-1]
    assert "".join(part.delta.content for part in contents) == choice.message.content
    entries = [entry for part in contents for entry in part.logprobs.content]
    assert entries == choice.logprobs.content
    assert [i for part in contents for i in part.token_ids or ()] == choice.token_ids
    assert parts[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    if "\ufffd" not in choice.message.content:
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert joined == choice.message.content.encode()


async def test_entries_ride_with_their_text(
    http: httpx.AsyncClient, engine: StubEngine, tokenizer: Tokenizer
) -> None:
    """S3: facts 1.6, a token's entry comes with the chunk that completes its text."""
    text = "one two 🙂 three four"
    engine.reply = reply_with(tokenizer, text)
    events = await events_of(http, logprobs=True, stop=["two thirds", "three four five"])
    content, entries = b"", b""
    for event in events[1:-1]:
        [choice] = event["choices"]
        content += choice["delta"]["content"].encode()
        for entry in choice["logprobs"]["content"]:
            entries += bytes(entry["bytes"])
        assert content.startswith(entries)
        unseen = content.removeprefix(entries)
        longest = max(len(tokenizer.token_bytes(i)) for i in engine.reply(engine.requests[0]))
        assert len(unseen) < longest
    assert content == entries == text.encode()


async def test_errors_before_the_first_token_keep_their_status(
    http: httpx.AsyncClient, engine: StubEngine
) -> None:
    """S2: facts 1.4, a request that fails before its first token is no 200."""
    engine.failure = RequestUpdate(
        request_id="x", finish_reason=FinishReason.ERROR, error="bad", is_user_error=True
    )
    assert (await http.post(PATH, json=CHAT | {"stream": True})).status_code == 400
    engine.die()
    assert (await http.post(PATH, json=CHAT | {"stream": True})).status_code == 500


async def test_line_separators_do_not_split_events() -> None:
    """S2: facts 1.4, an event is one line even for clients that split at U+2028 or U+0085."""
    text = "a\u2028b\u2029c\u0085d\ne\r\x0b\x1cf"
    event = encode_event(ErrorBody(ErrorObject(message=text, type="t"))).decode()
    assert event.endswith("\n\n")
    assert len(event.removesuffix("\n\n").splitlines()) == 1
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == text


async def test_raw_bytes(app: ASGIApp, engine: StubEngine) -> None:
    """S2: facts 1.4 over a socket: nothing is sent before the first token, each token at once."""
    engine.hold_after = 0
    async with live_server(app) as address:
        body = json.dumps(CHAT | {"stream": True}).encode()
        connection = await RawConnection.post(address, PATH, body)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.reader.read(1), 0.1)
        engine.hold_after = 2
        engine.gate.set()
        status, headers = await connection.head()
        assert status == "HTTP/1.1 200 OK"
        assert headers["transfer-encoding"] == "chunked"
        chunks = []
        while chunk := await connection.chunk():
            chunks.append(chunk)
        assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
        assert all(chunk.count(b"\n") == 2 for chunk in chunks)
        assert chunks[-1] == b"data: [DONE]\n\n"
        assert await connection.reader.read() == b""
        connection.writer.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_disconnect_aborts(
    app: ASGIApp,
    engine: StubEngine,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    hold_after: int,
    path: str,
) -> None:
    """S4: a client that vanishes, before or after the first token, aborts every choice."""
    caplog.set_level(logging.INFO)
    engine.hold_after = hold_after
    async with live_server(app) as address:
        fields = {"prompt": "x"} if path == "/v1/completions" else CHAT
        body = json.dumps(fields | {"stream": stream, "n": 2}).encode()
        connection = await RawConnection.post(address, path, body)
        await until(lambda: len(engine.requests) == 2)
        if stream and hold_after:
            await connection.head()
            await connection.chunk()
        assert engine.aborted == []
        await connection.reset()
        await until(lambda: len(engine.aborted) == 2)
        assert engine.finished == []
        engine.gate.set()
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
            assert (await http.post(PATH, json=CHAT)).status_code == 200
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


class HoldingEngine(StubEngine):
    """An engine client that keeps its generators, so that only `aclose` can end them."""

    def __init__(self, like: StubEngine) -> None:
        super().__init__(like.tokenizer, like.reply)
        self.kept: list[AsyncIterator[RequestUpdate]] = []

    def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:  # type: ignore[override]
        updates = super().generate(request)
        self.kept.append(updates)
        return updates


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_closing_a_stream_aborts(
    model: ServedModel, engine: StubEngine, num_choices: int
) -> None:
    """S4: a stream that is closed between two chunks aborts its requests."""
    holding = HoldingEngine(engine)
    served = dataclasses.replace(model, client=holding)
    stream: Any = await ChatService(served).create(CHAT | {"stream": True, "n": num_choices})
    await anext(stream)
    await stream.aclose()
    assert len(holding.aborted) == num_choices


async def test_other_requests_survive_a_disconnect(app: ASGIApp, engine: StubEngine) -> None:
    """S4: one client's end leaves another's answer whole."""
    engine.hold_after = 1
    async with live_server(app) as address:
        body = json.dumps(CHAT | {"stream": True}).encode()
        leaving = await RawConnection.post(address, PATH, body)
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
            staying = asyncio.create_task(http.post(PATH, json=CHAT))
            await until(lambda: len(engine.requests) == 2)
            await leaving.reset()
            await until(lambda: len(engine.aborted) == 1)
            engine.gate.set()
            body = (await staying).json()
    assert body["choices"][0]["message"]["content"] == "The answer is 42."


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_engine_death(app: ASGIApp, engine: StubEngine, path: str) -> None:
    """S4: when the engine dies a stream ends with an error event and [DONE], a call with 500."""
    engine.hold_after = 2
    async with live_server(app) as address:
        fields = {"prompt": "x"} if path == "/v1/completions" else CHAT
        stream = await RawConnection.post(
            address, path, json.dumps(fields | {"stream": True}).encode()
        )
        await stream.head()
        await stream.chunk()
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
            call = asyncio.create_task(http.post(path, json=fields))
            await until(lambda: len(engine.requests) == 2)
            engine.die()
            response = await call
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert (await http.get("/health")).status_code == 503
        chunks = []
        while chunk := await stream.chunk():
            chunks.append(chunk)
        assert json.loads(chunks[-2][6:])["error"]["type"] == "server_error"
        assert chunks[-1] == b"data: [DONE]\n\n"
        stream.writer.close()


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client against a real server."""
    async with (
        live_server(app) as (host, port),
        openai.AsyncOpenAI(
            base_url=f"http://{host}:{port}/v1", api_key="k", max_retries=0
        ) as official,
    ):
        yield official


async def test_official_client(client: openai.AsyncOpenAI) -> None:
    """S2: the openai package lists models, chats and completes, streamed and not."""
    assert [model.id async for model in await client.models.list()] == ["gander-12m", "team/alias"]
    assert (await client.models.retrieve("team/alias")).id == "team/alias"
    messages: Any = CHAT["messages"]
    chat = await client.chat.completions.create(
        model="gander-12m", messages=messages, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in chat.choices] == ["The answer is 42."] * 2
    assert chat.choices[0].logprobs is not None
    text = ""
    last = None
    async for chunk in await client.chat.completions.create(
        model="gander-12m",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
    ):
        last = chunk
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert text == "The answer is 42."
    assert last is not None
    assert last.usage is not None
    completion = await client.completions.create(
        model="gander-12m", prompt="Q", echo=True, logprobs=1
    )
    assert completion.choices[0].text == "QThe answer is 42."
    parts = [
        chunk.choices[0].text
        async for chunk in await client.completions.create(
            model="gander-12m", prompt="Q", stream=True
        )
    ]
    assert "".join(parts) == "The answer is 42."


async def test_official_stream_helper(client: openai.AsyncOpenAI) -> None:
    """S2: facts 1.4, the client's accumulating helper sees one role and the whole text."""
    messages: Any = CHAT["messages"]
    async with client.chat.completions.stream(model="gander-12m", messages=messages) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].message.content == "The answer is 42."
    assert final.choices[0].finish_reason == "stop"


async def test_official_errors(client: openai.AsyncOpenAI, engine: StubEngine) -> None:
    """S2: facts 1.5, failures map to the client's exceptions with id, code and param."""
    messages: Any = CHAT["messages"]
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=messages)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="gander-12m", messages=messages, n=0)
    engine.is_full = True
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model="gander-12m", messages=messages)
    assert full.value.status_code == 503
    engine.is_full = False
    engine.hold_after = 2
    stream = await client.chat.completions.create(
        model="gander-12m", messages=messages, stream=True
    )
    engine.die()
    with pytest.raises(openai.APIError, match="engine has stopped"):
        async for _ in stream:
            pass


async def test_large_body_reaches_the_client_as_413(client: openai.AsyncOpenAI) -> None:
    """S6: the official client sees the 413 although the server stops reading."""
    with pytest.raises(openai.APIStatusError) as refused:
        await client.completions.create(model="gander-12m", prompt="x" * (16 << 20))
    assert refused.value.status_code == 413
