"""Streams and calls that end early: clients that vanish, an engine that dies."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from engine.request import NewRequest, RequestUpdate
from server.service.chat import ChatService
from server.service.served_model import ServedModel
from tests.server.live_server import RawConnection, live_server, until
from tests.server.stub_engine import StubEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


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
