"""What is served here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.routes.bodies import json_response
from server.service.state import ServerState


def model_routes(state: ServerState) -> list[Route]:
    """/v1/models and /v1/models/{id}; an id may hold slashes."""

    async def list_models(request: Request) -> Response:
        return json_response(state.require_model().cards())

    async def retrieve_model(request: Request) -> Response:
        model = state.require_model()
        return json_response(model.card(model.name_for(request.path_params["id"])))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    ]
