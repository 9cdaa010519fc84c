"""Starting the engine process, and a client of it."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict

import msgspec

from engine.client import EngineDeadError, EngineInfo, EngineStats, QueueFullError
from engine.config import EngineConfig
from engine.frames import (
    Abort,
    Failed,
    GetStats,
    Ready,
    Refused,
    Stats,
    Submit,
    Updates,
    engine_decoder,
    read_payload,
    send_frame,
)
from engine.request import NewRequest, RequestUpdate, check_request, rejection

CLOSE_TIMEOUT_S = 10.0
GONE = "the engine process is gone"


async def start_worker(config: EngineConfig) -> WorkerClient:
    """Start an engine process and wait until it is ready.

    Raises:
        ValueError: the engine refuses the options or the checkpoint.
        EngineDeadError: the process died while starting.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "engine.worker",
            str(theirs.fileno()),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            # Signals to the terminal or the group reach the parent only, also while imports run.
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(asdict(config)))
        process.stdin.close()
        payload = await read_payload(reader)
        frame = None if payload is None else engine_decoder.decode(payload)
        match frame:
            case Ready(info):
                return WorkerClient(info, process, reader, writer)
            case Failed(message, is_user_error):
                raise ValueError(message) if is_user_error else EngineDeadError(message)
            case _:
                raise EngineDeadError(f"{GONE}: exit status {await process.wait()} while starting")
    except BaseException:
        writer.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise


class WorkerClient:
    """Implements `EngineClient` over the socket. Belongs to the loop that made it."""

    def __init__(
        self,
        info: EngineInfo,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._info = info
        self._process, self._reader, self._writer = process, reader, writer
        self._updates: dict[str, asyncio.Queue[RequestUpdate | Exception]] = {}
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._fault: str | None = None
        self._task = asyncio.create_task(self._read())

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def process_id(self) -> int:
        """The engine process, for signals and for measuring."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._fault is None

    async def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:
        """See `EngineClient.generate`."""
        self._check_alive()
        try:
            check_request(request, self._info.limits)
            if request.request_id in self._updates:
                raise ValueError(f"request id {request.request_id} is already in use")
        except ValueError as refusal:
            yield rejection(request.request_id, refusal)
            return
        updates: asyncio.Queue[RequestUpdate | Exception] = asyncio.Queue()
        self._updates[request.request_id] = updates
        is_over = False
        try:
            send_frame(self._writer, Submit(request))
            while not is_over:
                update = await updates.get()
                if isinstance(update, Exception):
                    is_over = True
                    raise update
                is_over = update.finish_reason is not None
                yield update
        finally:
            self._updates.pop(request.request_id, None)
            if not is_over and self._fault is None:
                send_frame(self._writer, Abort(request.request_id))

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        self._check_alive()
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        send_frame(self._writer, GetStats())
        return await answer

    async def close(self) -> None:
        """See `EngineClient.close`. The process ends when its socket closes."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end("the engine was closed")
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _read(self) -> None:
        fault = GONE
        try:
            while (payload := await read_payload(self._reader)) is not None:
                frame = engine_decoder.decode(payload)
                match frame:
                    case Updates(updates):
                        for update in updates:
                            self._put(update.request_id, update)
                    case Refused(request_id, message):
                        self._put(request_id, QueueFullError(message))
                    case Stats(stats):
                        answer = self._stats.popleft()
                        if not answer.done():
                            answer.set_result(stats)
                    case Failed(message, _):
                        fault = message
                    case Ready():
                        raise AssertionError("the engine is ready only once")
        finally:
            # Also when a frame makes no sense: nobody may wait for a reader that has ended.
            self._end(fault)

    def _put(self, request_id: str, item: RequestUpdate | Exception) -> None:
        # A request that was given up here may still have updates on the way.
        if (updates := self._updates.get(request_id)) is not None:
            updates.put_nowait(item)

    def _end(self, fault: str) -> None:
        if self._fault is not None:
            return
        self._fault = fault
        for updates in self._updates.values():
            updates.put_nowait(EngineDeadError(fault))
        for answer in self._stats:
            if not answer.done():
                answer.set_exception(EngineDeadError(fault))
        self._stats.clear()

    def _check_alive(self) -> None:
        if self._fault is not None:
            raise EngineDeadError(self._fault)
