"""Routes, errors, keys and limits of the HTTP application."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging

import httpx
import pytest
from starlette.types import ASGIApp

from server.app import AppOptions, build_app
from server.service.served_model import ServedModel
from server.service.state import ServerState
from tests.server.live_server import RawConnection, live_server
from tests.server.stub_engine import StubEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-secret-1"


def error_of(response: httpx.Response) -> dict[str, object]:
    """The error object, after a check that the body is exactly OpenAI's shape."""
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(body["error"])


@pytest.mark.parametrize("path", ["/", "/v1/responses", "/v1/messages", "/v1/completions/"])
async def test_unknown_routes_are_json_404(http: httpx.AsyncClient, path: str) -> None:
    """S2: facts 1.0, every other route answers 404 with a JSON error, never HTML."""
    for response in (await http.post(path, json={}), await http.get(path)):
        assert response.status_code == 404
        assert error_of(response)["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
    ],
)
async def test_wrong_method_is_405_with_allow(
    http: httpx.AsyncClient, method: str, path: str, allowed: set[str]
) -> None:
    """S2: facts 1.0, a wrong method is 405 and names the right ones."""
    response = await http.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    assert error_of(response)["code"] == "method_not_allowed"


async def test_models_lists_every_served_name(http: httpx.AsyncClient) -> None:
    """S2: facts 1.8, /v1/models and retrieval by an id that holds a slash."""
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["gander-12m", "team/alias"]
    card = (await http.get("/v1/models/team/alias")).json()
    assert card == listed["data"][1]
    assert card["object"] == "model"
    assert card["root"] == "gander-12m"
    assert card["parent"] is None
    assert card["max_model_len"] == 256
    assert isinstance(card["created"], int)
    missing = await http.get("/v1/models/nobody/else")
    assert missing.status_code == 404
    assert error_of(missing) | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_model_names(http: httpx.AsyncClient) -> None:
    """S2: facts 1.8, an absent model is the served one, a name is echoed, unknown is 404."""
    assert (await http.post("/v1/chat/completions", json=CHAT)).json()["model"] == "gander-12m"
    asked = await http.post("/v1/chat/completions", json=CHAT | {"model": "team/alias"})
    assert asked.json()["model"] == "team/alias"
    unknown = await http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-9"})
    assert unknown.status_code == 404
    assert error_of(unknown)["code"] == "model_not_found"


async def test_status_endpoints(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S2: facts 1.8, /health and /ready follow the engine; /version names the version."""
    health = await http.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await http.get("/ready")).status_code == 200
    assert (await http.get("/version")).json()["version"]
    engine.die()
    assert (await http.get("/health")).status_code == 503
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/metrics")).status_code == 200


async def test_before_the_engine_is_ready(app: ASGIApp) -> None:
    """S2: facts 1.5, while the model loads requests get 503 and Retry-After."""
    loading = build_app(ServerState(), AppOptions())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=loading), base_url="http://test"
    ) as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            response = await client.post(path, json=CHAT)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert error_of(response)["type"] == "service_unavailable"
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 503


async def test_draining_refuses_new_requests(http: httpx.AsyncClient, state: ServerState) -> None:
    """S6: while draining /ready fails and new requests get 503; the engine is healthy."""
    state.drain()
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200
    response = await http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert "retry-after" in response.headers


async def test_full_queue_is_503(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """S4: facts 1.5, a full queue answers 503 with Retry-After, streamed or not."""
    engine.is_full = True
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert error_of(response)["type"] == "overloaded"


async def test_api_key(state: ServerState, caplog: pytest.LogCaptureFixture) -> None:
    """S6: without the key 401 and no work; both header forms are let in; never logged."""
    caplog.set_level(logging.DEBUG)
    options = AppOptions(api_key=KEY)
    assert KEY not in repr(options)
    transport = httpx.ASGITransport(app=build_app(state, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEY},
            {"authorization": f"Basic {KEY}"},
            {"x-api-key": KEY + "x"},
            {"x-api-key": "schlüssel".encode("latin-1")},
        ):
            response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
            assert (await client.get("/v1/nowhere", headers=headers)).status_code == 401
        for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            response = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert response.status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200
    assert KEY not in caplog.text


@pytest.mark.parametrize("framing", ["content-length: 1073741824", "transfer-encoding: chunked"])
async def test_large_body_is_413(app: ASGIApp, framing: str) -> None:
    """S6: facts 1.5, a body over the limit is refused before its end, and is not waited for."""
    async with live_server(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        if "chunked" in framing:
            writer.write(b"200000\r\n" + b" " * 0x200000 + b"\r\n")
        connection = RawConnection(reader, writer)
        async with asyncio.timeout(1):
            status, headers = await connection.head()
            body = await reader.readexactly(int(headers["content-length"]))
        assert status.startswith("HTTP/1.1 413 ")
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["type"] == "request_too_large"
        if "chunked" in framing:
            writer.write(b"0\r\n\r\n")
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_request_ids(http: httpx.AsyncClient) -> None:
    """S2: facts 1.5, x-request-id on every response: the client's own, or a fresh one."""
    own = await http.get("/health", headers={"x-request-id": "trace-7"})
    assert own.headers["x-request-id"] == "trace-7"
    first, second = [(await http.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    odd = await http.get("/health", headers={"x-request-id": "a b\x7f"})
    assert odd.headers["x-request-id"].startswith("req_")


async def test_log_has_one_line_per_request(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: status, path and id of each request; a path cannot forge a line; polls are silent."""
    caplog.set_level(logging.INFO, logger="server")
    await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "trace-8"})
    await http.get("/v1/x%0Aforged")
    await http.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "POST /v1/chat/completions 200 trace-8"
    assert lines[1].startswith("GET /v1/x%0Aforged 404 ")
    assert len(lines) == 2


class BrokenClient(StubEngine):
    """An engine client with a bug."""

    async def generate(self, request: object) -> object:  # type: ignore[override]
        raise KeyError("/secret/path")
        yield


async def test_a_bug_is_a_500_without_details(
    model: ServedModel, engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: facts 1.5, an unexpected exception is a JSON 500 that shows no path, and is logged."""
    state = ServerState()
    broken = BrokenClient(engine.tokenizer, engine.reply)
    state.open(dataclasses.replace(model, client=broken))
    async with (
        live_server(build_app(state, AppOptions())) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as http,
    ):
        response = await http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "secret" not in response.text
    assert "KeyError" in caplog.text
