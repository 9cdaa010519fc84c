"""The endpoints that generate text, streamed or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.routes.bodies import json_response, read_json
from server.service.chat import ChatService
from server.service.completions import CompletionService
from server.service.served_model import ServedModel
from server.service.state import ServerState
from server.service.stream import PrimedStream
from server.streaming import EventStreamResponse, run_until_disconnect


class GenerationService(Protocol):
    """What generates: a whole response, or a stream that has its first chunk."""

    async def create(
        self, body: Mapping[str, Any]
    ) -> msgspec.Struct | PrimedStream[msgspec.Struct]: ...


def generate_routes(state: ServerState, max_body_bytes: int) -> list[Route]:
    """/v1/chat/completions and /v1/completions."""

    def route(path: str, service_of: Callable[[ServedModel], GenerationService]) -> Route:
        async def answer(request: Request) -> Response:
            service = service_of(state.require_model())
            body = await read_json(request, max_body_bytes)
            # A client that goes away before the first token or the whole answer stops the work.
            result = await run_until_disconnect(request.receive, service.create(body))
            if isinstance(result, PrimedStream):
                return EventStreamResponse(result)
            return json_response(result)

        return Route(path, answer, methods=["POST"])

    return [
        route("/v1/chat/completions", ChatService),
        route("/v1/completions", CompletionService),
    ]
