"""Streams: the bytes on the wire, the official client, disconnects and a dying engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from engine.request import FinishReason, RequestUpdate
from engine.tokens import Tokenizer
from server.errors import ErrorBody, ErrorObject
from server.service.chat import ChatService
from server.service.served_model import ServedModel
from server.streaming import encode_event
from tests.server.live_server import RawConnection, live_server
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
