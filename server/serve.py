"""Runs the HTTP server and the engine process side by side, and ends both together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
import uvloop

from engine.client import EngineClient, EngineDeadError
from engine.config import EngineConfig
from engine.worker_client import start_worker
from server.app import DEFAULT_MAX_BODY_BYTES, AppOptions, build_app
from server.metrics import ServerMetrics
from server.service.served_model import FrontEnd, ServedModel, check_checkpoint, load_front_end
from server.service.state import ServerState

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 0.2
DRAIN_TIMEOUT_S = 30
CLOSING_TIMEOUT_S = 5
LISTEN_BACKLOG = 2048
# Longer than clients keep idle connections, so that none is closed while a request is on its way.
KEEP_ALIVE_S = 75

StartEngine = Callable[[EngineConfig], Awaitable[EngineClient]]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `deltaloom serve` was asked for."""

    engine: EngineConfig
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES


def run_serve(options: ServeOptions, start_engine: StartEngine = start_worker) -> int:
    """Serve until a signal comes (0) or the engine dies (1).

    Raises:
        ValueError: an option or the checkpoint cannot be used; the message says which.
    """
    folder = Path(options.engine.model_path)
    check_checkpoint(folder)
    front_end = load_front_end(folder)
    listener = bind(options.host, options.port)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(options, front_end, listener, start_engine))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address; port 0 takes a free one.

    Raises:
        ValueError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}") from error
    return listener


def build_server(options: ServeOptions, state: ServerState) -> QuietServer:
    """The HTTP server of the application, not yet running."""
    app_options = AppOptions(api_key=options.api_key, max_body_bytes=options.max_body_bytes)
    return QuietServer(
        uvicorn.Config(
            build_app(state, app_options),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=LISTEN_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_TIMEOUT_S,
        )
    )


async def serve(
    options: ServeOptions,
    front_end: FrontEnd,
    listener: socket.socket,
    start_engine: StartEngine,
) -> int:
    """Answer on `listener` from the start, with 503 until the engine is ready."""
    state = ServerState()
    server = build_server(options, state)
    host, port = listener.getsockname()[:2]
    logger.info("listening on http://%s:%d, loading the model", host, port)
    with stop_on_signals(server, state):
        http = asyncio.create_task(server.serve(sockets=[listener]))
        engine = asyncio.create_task(keep_engine(options, front_end, state, start_engine))
        await asyncio.wait((http, engine), return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            http.result()
            return 0
        state.drain()
        server.should_exit = True
        await http
        try:
            engine.result()
        except EngineDeadError as error:
            logger.error("the engine did not start: %s", error)
        else:
            logger.error("the engine has died")
        return 1


async def keep_engine(
    options: ServeOptions, front_end: FrontEnd, state: ServerState, start_engine: StartEngine
) -> None:
    """Start the engine, open the server to requests, and return when the engine has died."""
    client = await start_engine(options.engine)
    try:
        name = options.names[0]
        state.open(
            ServedModel(
                client=client,
                front_end=front_end,
                names=options.names,
                root=name,
                metrics=ServerMetrics(name, client.info),
            )
        )
        phases = ", ".join(f"{phase} {s:.1f} s" for phase, s in client.info.startup_s.items())
        logger.info("ready: %s (%s)", ", ".join(options.names), phases)
        while client.is_alive:
            await asyncio.sleep(ALIVE_CHECK_S)
    finally:
        await client.close()


class QuietServer(uvicorn.Server):
    """Leaves the signals to `stop_on_signals`, so that a stop is a return and no re-raise."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


@contextmanager
def stop_on_signals(server: uvicorn.Server, state: ServerState) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second ends open requests at once."""
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []

    def stop() -> None:
        if leaving:
            server.force_exit = server.should_exit = True
            return
        state.drain()
        leaving.append(loop.create_task(exit_when_idle(server)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        for task in leaving:
            task.cancel()


async def exit_when_idle(server: uvicorn.Server) -> None:
    """Go on listening, so that probes and clients get their 503, until open requests end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while server.server_state.tasks:
                await asyncio.sleep(ALIVE_CHECK_S)
    server.should_exit = True
