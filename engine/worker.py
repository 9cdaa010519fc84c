"""The engine process: an engine behind a socket, gone when the other side is gone.

Started by `engine.worker_client` as `python -m engine.worker FD`, with one end of a Unix
socket pair as file descriptor FD and the options as JSON on standard input.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import msgspec

from engine.client import QueueFullError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.frames import (
    Abort,
    Failed,
    GetStats,
    Ready,
    Refused,
    Stats,
    Submit,
    Updates,
    client_decoder,
    read_payload,
    send_frame,
)
from engine.request import RequestUpdate, rejection
from engine.start import start_engine

logger = logging.getLogger(__name__)


class Outbox:
    """Collects the updates of one drain into one frame."""

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._updates: list[RequestUpdate] = []

    def put(self, update: RequestUpdate) -> None:
        """Send `update` with others that come in the same turn of the event loop."""
        if not self._updates:
            asyncio.get_running_loop().call_soon(self.flush)
        self._updates.append(update)

    def flush(self) -> None:
        """Send what has been collected."""
        # A failed engine ends every stream with `Failed`, not with errors of the requests.
        if self._updates and not self._engine.has_failed:
            send_frame(self._writer, Updates(self._updates))
            self._updates = []


async def serve_socket(engine: Engine, sock: socket.socket) -> None:
    """Run the engine until the other side closes the socket or the engine fails."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    send_frame(writer, Ready(engine.info))
    outbox = Outbox(engine, writer)
    engine_task = asyncio.create_task(engine.run())
    reader_task = asyncio.create_task(read_requests(engine, reader, writer, outbox))
    await asyncio.wait([engine_task, reader_task], return_when=asyncio.FIRST_COMPLETED)
    outbox.flush()
    if engine.error is not None:
        send_frame(writer, Failed(engine.error, is_user_error=False))
        await writer.drain()
    for task in (engine_task, reader_task):
        task.cancel()
    await asyncio.gather(engine_task, reader_task, return_exceptions=True)
    engine.close()
    writer.close()


async def read_requests(
    engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outbox: Outbox
) -> None:
    """Hand the client's frames to the engine until the socket closes."""
    while (payload := await read_payload(reader)) is not None:
        frame = client_decoder.decode(payload)
        match frame:
            case Submit(request):
                try:
                    engine.submit(request, outbox.put)
                except QueueFullError as refusal:
                    send_frame(writer, Refused(request.request_id, str(refusal)))
                except ValueError as refusal:
                    outbox.put(rejection(request.request_id, refusal))
            case Abort(request_id):
                engine.abort(request_id)
            case GetStats():
                send_frame(writer, Stats(engine.stats()))


def main(file_descriptor: int) -> int:
    """Start the engine and serve one socket; the exit status."""
    # A stop often reaches more processes than the parent, and the parent decides when to stop:
    # the socket's end is this one's signal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")
    sock = socket.socket(fileno=file_descriptor)
    config = EngineConfig(**msgspec.json.decode(sys.stdin.buffer.read()))
    try:
        engine = start_engine(config, has_progress=sys.stderr.isatty())
    except Exception as fault:
        is_user_error = isinstance(fault, ValueError)
        if not is_user_error:
            logger.exception("the engine could not start")
        asyncio.run(report_failure(sock, Failed(str(fault), is_user_error)))
        return 2 if is_user_error else 1
    asyncio.run(serve_socket(engine, sock))
    return 1 if engine.has_failed else 0


async def report_failure(sock: socket.socket, failure: Failed) -> None:
    """Tell the client why there will be no engine."""
    _, writer = await asyncio.open_unix_connection(sock=sock)
    send_frame(writer, failure)
    await writer.drain()
    writer.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
