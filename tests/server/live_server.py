"""A real HTTP server on a free port, and raw access to its bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from server.serve import QuietServer, bind

WAIT_S = 5.0


@asynccontextmanager
async def live_server(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """Serve `app` as `deltaloom serve` does; gives host and port."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = QuietServer(config)
    address: tuple[str, int] = listener.getsockname()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield address
    finally:
        server.should_exit = True
        await task
        listener.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something that others do has happened."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class RawConnection:
    """A socket that speaks HTTP byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, address: tuple[str, int], path: str, body: bytes) -> RawConnection:
        """Send one request with a whole body."""
        reader, writer = await asyncio.open_connection(*address)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return cls(reader, writer)

    async def head(self) -> tuple[str, dict[str, str]]:
        """Status line and headers of the response."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        return lines[0], headers

    async def chunk(self) -> bytes:
        """The next piece of a chunked body, empty at its end."""
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def reset(self) -> None:
        """Vanish as a killed client does."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.writer.close()
        await asyncio.sleep(0)
