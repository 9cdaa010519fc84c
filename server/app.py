"""The ASGI application: routes, errors in OpenAI's shape, API key, request ids."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    InternalError,
    MethodNotAllowedError,
    RouteNotFoundError,
)
from server.routes.bodies import error_response
from server.routes.generate import generate_routes
from server.routes.models import model_routes
from server.routes.status import OPEN_PATHS, status_routes
from server.routes.tokens import token_routes
from server.service.state import ServerState
from server.streaming import HTTP_CLIENT_CLOSED, ClientGoneError

logger = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 8 << 20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """What the HTTP side can be told. Without an API key everyone is let in."""

    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES


def build_app(state: ServerState, options: AppOptions) -> ASGIApp:
    """The application; `state` says what it can answer at any moment."""
    middleware = []
    if options.api_key is not None:
        middleware.append(Middleware(ApiKeyMiddleware, api_key=options.api_key))
    app = Starlette(
        routes=[
            *generate_routes(state, options.max_body_bytes),
            *model_routes(state),
            *token_routes(state, options.max_body_bytes),
            *status_routes(state),
        ],
        middleware=middleware,
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_exception,
            ClientGoneError: on_client_gone,
            ClientDisconnect: on_client_gone,
            Exception: on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    # Outside of everything, so that the answer to a bug has an id as well.
    return RequestIdMiddleware(app)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Answer an expected failure."""
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router refuses, in the API's own shape."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 404:
        return error_response(RouteNotFoundError(method, path))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return error_response(MethodNotAllowedError(method, path, allowed))
    return error_response(BadRequestError(error.detail))


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Note that nobody waits for the answer any more; nothing can be sent."""
    logger.info("the client closed %s %s early", request.method, quote(request.url.path))
    return Response(status_code=HTTP_CLIENT_CLOSED)


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a bug; the server log has its traceback."""
    return error_response(InternalError())


class RequestIdMiddleware:
    """Gives every response an x-request-id, the client's own if it is a plain word, and a log line.

    The status endpoints, which are polled, have no line.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if _REQUEST_ID.fullmatch(request_id) is None:
            request_id = f"req_{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if scope["path"] not in OPEN_PATHS:
                    path = quote(scope["path"])
                    logger.info("%s %s %d %s", scope["method"], path, message["status"], request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Lets only requests with the API key pass, save to the status endpoints."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or self._is_known(scope["headers"]):
            await self._app(scope, receive, send)
            return
        await error_response(AuthenticationError())(scope, receive, send)

    def _is_known(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return any(hmac.compare_digest(key, self._api_key) for key in offered_keys(headers))


def offered_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys in `authorization: Bearer` and `x-api-key` headers."""
    keys = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                keys.append(key.strip())
    return keys
