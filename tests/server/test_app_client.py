"""The official client against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from starlette.types import ASGIApp

from tests.server.live_server import live_server
from tests.server.stub_engine import StubEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


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
