"""Bounds on connections that aiohttp doesn't have: how many, and how long a request's head may take.

`GuardedConnection` stands between the transport and aiohttp's protocol, which gets the real transport and never knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

log = logging.getLogger(__name__)

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
_FULL_BODY = (
    b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":"too_many_connections"}}'
)


@dataclass
class ConnectionLimits:
    max_connections: int = 4096
    header_seconds: float = 30.0
    """From the first byte of a request to the end of its head."""

    body_seconds: float = 60.0
    """From the end of the head to the end of the body."""

    idle_seconds: float = 75.0
    """Keep-alive between requests."""

    write_seconds: float = 30.0
    """A client that reads nothing for so long while output waits is cut off."""


@dataclass
class Guard:
    """The connections of one server."""

    limits: ConnectionLimits
    connections: dict[asyncio.BaseProtocol, GuardedConnection] = field(default_factory=dict)

    def wrap(self, make_protocol: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory for create_server, around aiohttp's."""
        return lambda: GuardedConnection(self, make_protocol())

    def head_is_in(self, request: web.Request) -> None:
        """To be called as soon as a handler runs."""
        connection = self.connections.get(request.protocol)
        if connection is not None:
            connection.head_is_in()

    def answered(self, request: web.Request) -> None:
        """To be called when a request's answer is through."""
        connection = self.connections.get(request.protocol)
        if connection is not None:
            connection.answered()


class GuardedConnection(asyncio.Protocol):
    def __init__(self, guard: Guard, inner: asyncio.Protocol) -> None:
        self._guard = guard
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._handling = False
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        if len(self._guard.connections) >= self._guard.limits.max_connections:
            self._refused = True
            transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
            transport.close()
            return
        self._transport = transport
        self._guard.connections[self._inner] = self
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._handling and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._guard.limits.header_seconds, self._too_slow)
        self._inner.data_received(data)

    def head_is_in(self) -> None:
        self._handling = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None

    def answered(self) -> None:
        self._handling = False
        self._watch_flush(left=None)

    def _watch_flush(self, left: int | None) -> None:
        """The end of an answer may sit in the transport's buffer for ever: cut off a client that takes none of it.

        `left`: bytes that were there at the last look.
        """
        self._flush_timer = None
        if self._transport is None:
            return
        waiting = self._transport.get_write_buffer_size()
        if left is not None and waiting and waiting >= left:
            log.info("closing a connection that read nothing for %.0f s", self._guard.limits.write_seconds)
            self._transport.abort()
        elif left is None or waiting:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self._guard.limits.write_seconds, self._watch_flush, waiting)

    def _too_slow(self) -> None:
        self._timer = None
        if self._transport is not None:
            log.info("closing a connection whose request head took over %.0f s", self._guard.limits.header_seconds)
            self._transport.abort()

    def eof_received(self) -> bool | None:
        return None if self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        if not self._refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if not self._refused:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._transport = None
        if not self._refused:
            self._guard.connections.pop(self._inner, None)
            self._inner.connection_lost(error)
