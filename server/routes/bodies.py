"""Reading request bodies and writing JSON."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, BodyTooLargeError
from server.service.request_schema import parse_json_object

DISCARD_TIMEOUT_S = 2.0
MAX_DISCARDED_BYTES = 256 << 20


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's JSON object. Reading stops as soon as the body is known to be too large.

    Raises:
        BodyTooLargeError: over `max_bytes`.
        BadRequestError: no JSON object.
        ClientDisconnect: the client went away while sending.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise BodyTooLargeError(max_bytes)
    return parse_json_object(bytes(body))


def json_response(body: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The response of a failed request."""
    body = msgspec.json.encode(error.body)
    kind = DiscardingResponse if isinstance(error, BodyTooLargeError) else Response
    return kind(body, error.status, error.headers, media_type="application/json")


class DiscardingResponse(Response):
    """Answers at once, then throws away what the client still sends, up to a bound.

    Closing while data comes in resets the connection, and then most clients never see the
    answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                await discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def discard(receive: Receive) -> None:
    """Read to the end of the body, but no more than MAX_DISCARDED_BYTES."""
    num_bytes = 0
    while num_bytes < MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        num_bytes += len(message.get("body", b""))
