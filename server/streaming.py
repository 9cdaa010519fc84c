"""Server-sent events, and the end of work whose client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, InternalError
from server.service.stream import PrimedStream

logger = logging.getLogger(__name__)

DONE_EVENT = b"data: [DONE]\n\n"
HTTP_CLIENT_CLOSED = 499

_ENCODER = msgspec.json.Encoder()
# JSON escapes \n and \r, but some clients split lines at these characters too.
_LINE_ENDS = (
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)

Chunk = TypeVar("Chunk", bound=msgspec.Struct)
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def encode_event(chunk: msgspec.Struct) -> bytes:
    """One event: a single line of JSON."""
    data = _ENCODER.encode(chunk)
    for character, escaped in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, and cancel it when the client goes. The request's body must have been read.

    Raises:
        ClientGoneError: the client has gone; `work` has been cancelled and has ended.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response, Generic[Chunk]):
    """Sends the chunks of a stream as events; the last event is always [DONE].

    An error after the start becomes an error event: a bare end would look like success.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: PrimedStream[Chunk]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._send_all(send))
        except ClientGoneError:
            logger.info("the client closed the stream of %s early", scope["path"])
        finally:
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await _send_body(send, encode_event(chunk))
        except ApiError as error:
            await _send_body(send, encode_event(error.body))
        except Exception:
            logger.exception("a stream ended with an internal error")
            await _send_body(send, encode_event(InternalError().body))
        await _send_body(send, DONE_EVENT, has_more=False)


async def _send_body(send: Send, body: bytes, *, has_more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": has_more})
