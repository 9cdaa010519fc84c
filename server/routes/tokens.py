"""Tokenizer endpoints, with and without the /v1 prefix."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.routes.bodies import json_response, read_json
from server.service.state import ServerState
from server.service.tokenize import TokenizeService


def token_routes(state: ServerState, max_body_bytes: int) -> list[Route]:
    """/tokenize, /detokenize and /tokenizer_info."""

    async def tokenize(request: Request) -> Response:
        service = TokenizeService(state.require_model())
        return json_response(await service.tokenize(await read_json(request, max_body_bytes)))

    async def detokenize(request: Request) -> Response:
        service = TokenizeService(state.require_model())
        return json_response(service.detokenize(await read_json(request, max_body_bytes)))

    async def tokenizer_info(request: Request) -> Response:
        return json_response(TokenizeService(state.require_model()).tokenizer_info())

    routes = []
    for prefix in ("", "/v1"):
        routes += [
            Route(f"{prefix}/tokenize", tokenize, methods=["POST"]),
            Route(f"{prefix}/detokenize", detokenize, methods=["POST"]),
            Route(f"{prefix}/tokenizer_info", tokenizer_info, methods=["GET"]),
        ]
    return routes
