"""The endpoints that say how the engine is built and how much of it is in use."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from engine.client import EngineInfo
from engine.frames import Ready, encoder, engine_decoder
from server.app import AppOptions, build_app
from server.service.served_model import ServedModel
from server.service.state import ServerState
from tests.server.stub_engine import StubEngine, stub_info

PATHS = ("/v1/cache/status", "/server_info")


async def test_cache_status(http: httpx.AsyncClient) -> None:
    """V15, E6: units, use and every part of the plan in bytes. Oracle: the stub's numbers."""
    response = await http.get("/v1/cache/status")
    assert response.status_code == 200
    parts = {
        "weights": 1_000_000,
        "graphs": 0,
        "activations": 200_000,
        "sampling": 30_000,
        "tables": 4_000,
        "drafts": 0,
        "reserve": 500,
        "slots": 9 * 101_700,
        "pages": 65 * 64 * 512,
    }
    assert response.json() == {
        "geometry": {
            "page_size": 64,
            "unit_bytes": {
                "kv_per_token": 512,
                "gdn_per_slot": 100_000,
                "sampling_per_slot": 1_000,
                "verify_scratch_per_row": 6_000,
                "draft_per_slot": 700,
            },
        },
        "pages": {"capacity": 64, "used": 16},
        "tokens": {"capacity": 4096, "used": 1024},
        "slots": {"capacity": 8, "used": 3},
        "memory": {
            "free_bytes": 20_000_000,
            "budget_bytes": 10_000_000,
            "planned_bytes": sum(parts.values()),
            "parts": parts,
        },
    }


async def test_server_info(http: httpx.AsyncClient, engine: StubEngine) -> None:
    """E5: phases of the start and later compilations. Oracle: the stub's numbers."""
    body = (await http.get("/server_info")).json()
    assert body["startup_s"] == {"load": 0.5, "ready": 1.0}
    assert body["num_recompilations"] == 2
    assert body["speculation"] is None
    assert (body["model"], body["model_type"], body["device"]) == ("gander-12m", "stub", "cpu")
    assert body["limits"] == msgspec.to_builtins(engine.info.limits)


@pytest.mark.parametrize("path", PATHS)
async def test_status_while_loading_draining_and_dead(
    path: str, model: ServedModel, engine: StubEngine
) -> None:
    """S2, E6: 503 until there is an engine and after it died; a draining server still tells."""
    state = ServerState()
    transport = httpx.ASGITransport(app=build_app(state, AppOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get(path)).status_code == 503
        assert (await http.get("/ready")).status_code == 503
        state.open(model)
        assert (await http.get(path)).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        state.drain()
        assert (await http.get(path)).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        engine.die()
        dead = await http.get(path)
    assert dead.status_code == 503
    assert "engine has stopped" in dead.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_status_needs_the_key(path: str, state: ServerState) -> None:
    """S6: unlike /health and /metrics these are not for everyone. Oracle: 401."""
    transport = httpx.ASGITransport(app=build_app(state, AppOptions(api_key="sk-1")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers={"x-api-key": "sk-1"})).status_code == 200


def test_info_survives_the_wire() -> None:
    """E6: the plan reaches the HTTP process as it is. Oracle: equality after a round trip."""
    info = stub_info()
    decoded = engine_decoder.decode(encoder.encode(Ready(info)))
    assert isinstance(decoded, Ready)
    assert decoded.info == info
    assert isinstance(decoded.info, EngineInfo)
    assert decoded.info.memory is not None
    assert decoded.info.memory.parts == info.memory.parts  # type: ignore[union-attr]
