"""Liveness, readiness, version and metrics, which need no API key; and the engine's status."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.client import EngineDeadError
from engine.version import __version__
from server.routes.bodies import json_response
from server.service.engine_status import cache_status, read_stats, server_info
from server.service.response_schema import VersionResponse
from server.service.state import ServerState

OPEN_PATHS = frozenset(("/health", "/ready", "/version", "/metrics"))


def status_routes(state: ServerState) -> list[Route]:
    """/health, /ready, /version and /metrics; /v1/cache/status and /server_info."""

    async def health(request: Request) -> Response:
        return Response(status_code=200 if state.is_healthy else 503)

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if state.is_ready else 503)

    async def version(request: Request) -> Response:
        return json_response(VersionResponse(__version__))

    async def metrics(request: Request) -> Response:
        return Response(await render_metrics(state), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def cache(request: Request) -> Response:
        model, stats = await read_stats(state)
        return json_response(cache_status(model.client.info, stats))

    async def info(request: Request) -> Response:
        return json_response(server_info(*await read_stats(state)))

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/v1/cache/status", cache, methods=["GET"]),
        Route("/server_info", info, methods=["GET"]),
    ]


async def render_metrics(state: ServerState) -> bytes:
    """The exposition text: empty while loading, without the engine's part once it is dead."""
    model = state.loaded_model
    if model is None:
        return b""
    try:
        stats = await model.client.stats()
    except EngineDeadError:
        stats = None
    return model.metrics.render(stats)
