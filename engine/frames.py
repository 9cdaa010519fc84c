"""What the HTTP and the engine process say to each other, and how it looks on the wire.

A frame is a 4-byte little-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from engine.client import EngineInfo, EngineStats
from engine.request import NewRequest, RequestUpdate

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 2**30


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Client: run this request."""

    request: NewRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Client: end this request early."""

    request_id: str


class GetStats(msgspec.Struct, tag=True, frozen=True):
    """Client: send a `Stats`."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine: start-up is over; the first frame unless `Failed`."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine: start-up failed, or the engine has died; the last frame."""

    message: str
    is_user_error: bool


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Engine: the queue is full, this request was not taken."""

    request_id: str
    message: str


class Updates(msgspec.Struct, tag=True, frozen=True):
    """Engine: what one drain committed."""

    updates: list[RequestUpdate]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Engine: the answer to one `GetStats`, in order."""

    stats: EngineStats


FromClient = Submit | Abort | GetStats
FromEngine = Ready | Failed | Refused | Updates | Stats

encoder = msgspec.msgpack.Encoder()
client_decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def send_frame(writer: asyncio.StreamWriter, frame: FromClient | FromEngine) -> None:
    """Queue one frame for sending."""
    payload = encoder.encode(frame)
    assert len(payload) <= MAX_FRAME_BYTES, "a frame is too large"
    writer.write(LENGTH.pack(len(payload)) + payload)


async def read_payload(reader: asyncio.StreamReader) -> bytes | None:
    """The bytes of the next frame, None when the other side has closed or died."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        assert length <= MAX_FRAME_BYTES, "a frame is too large"
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
