"""A served model made of the embedded checkpoint's front end and a stub engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from engine.tokens import Tokenizer
from server.app import AppOptions, build_app
from server.metrics import ServerMetrics
from server.service.served_model import FrontEnd, ServedModel, load_front_end
from server.service.state import ServerState
from tests.server.stub_engine import StubEngine, reply_with

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"


@pytest.fixture(scope="session")
def front_end() -> FrontEnd:
    """Tokenizer and template of the embedded model."""
    return load_front_end(EMBEDDED)


@pytest.fixture(scope="session")
def tokenizer(front_end: FrontEnd) -> Tokenizer:
    """The embedded model's tokenizer."""
    assert front_end.tokenizer is not None
    return front_end.tokenizer


@pytest.fixture
def engine(tokenizer: Tokenizer) -> StubEngine:
    """An engine that answers everything with one sentence."""
    return StubEngine(tokenizer, reply_with(tokenizer, "The answer is 42."))


@pytest.fixture
def model(engine: StubEngine, front_end: FrontEnd) -> ServedModel:
    """The stub engine, served under two names."""
    return ServedModel(
        client=engine,
        front_end=front_end,
        names=("gander-12m", "team/alias"),
        root="gander-12m",
        metrics=ServerMetrics("gander-12m", engine.info),
    )


@pytest.fixture
def state(model: ServedModel) -> ServerState:
    """A server state that is open."""
    opened = ServerState()
    opened.open(model)
    return opened


@pytest.fixture
def app(state: ServerState) -> ASGIApp:
    """The application without an API key."""
    return build_app(state, AppOptions(max_body_bytes=1 << 20))


@pytest.fixture
async def http(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the application without a network."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
