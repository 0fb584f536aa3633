"""Frames between a worker's server process and its core process: 4-byte length, then one msgpack message.

One socket pair, both ends ours; a frame from the core carries all events of one step.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

from forebay_engine.core.handle import CoreInfo, CoreStats
from forebay_engine.settings import WorkerSettings
from forebay_engine.types import Abort, AbortDone, EngineRequest, FailEvent, SetDraining, TokenEvent

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A prompt of a million ids is 5 MB: anything near this is a broken stream."""

_LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, tag=True):
    """A CoreHandle method by name; `body` is its encoded argument (empty: none)."""

    id: int
    method: str
    body: bytes = b""


class Reply(msgspec.Struct, tag=True):
    id: int
    body: bytes = b""
    error: str | None = None


class Close(msgspec.Struct, tag=True):
    pass


class Started(msgspec.Struct, tag=True):
    info: CoreInfo


class StartFailed(msgspec.Struct, tag=True):
    """`kind` is the exception's class name: a ModelError is the user's to mend and shown as it is."""

    kind: str
    message: str


class Events(msgspec.Struct, tag=True):
    events: list[TokenEvent | FailEvent | AbortDone]


class Died(msgspec.Struct, tag=True):
    message: str


ToCore = EngineRequest | Abort | SetDraining | Call | Close
FromCore = Started | StartFailed | Events | CoreStats | Reply | Died

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
"""`enc_hook` meets only the paths in the settings."""


def frame(message: ToCore | FromCore) -> bytes:
    return _frame(message)


def frame_settings(settings: WorkerSettings) -> bytes:
    """The first frame to a core process."""
    return _frame(settings)


def parse_settings(body: bytes) -> WorkerSettings:
    return msgspec.msgpack.decode(body, type=WorkerSettings, dec_hook=lambda kind, value: kind(value))


def _frame(message: object) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message's bytes; None when the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {length} bytes between server and core, limit {MAX_FRAME_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
