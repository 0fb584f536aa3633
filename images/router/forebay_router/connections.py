"""Connections to workers: kept alive, one request at a time each. A relayed stream's bytes are handed on where they
arrive, without waking a task for each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from forebay_router.http1 import MAX_HEAD, BadResponse, Head, ResponseReader

HIGH_WATER = 128 * 1024
"""Unread bytes of a response at which its worker is read no further, until half of them are taken."""

MAX_IDLE = 256
"""Idle connections kept to one worker."""

Sink = Callable[[bytes], bool]
"""Takes body bytes; True: enough, the rest is kept for `read`."""


class Connection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._parts: deque[bytes] = deque()
        self._unread = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: Exception | None = None
        """Why the response can't be read on: an OSError, or BadResponse."""

        self._fresh = True
        """It has carried no request."""

        self._unasked = b""
        """What came before the first request: a worker that has too many connections says so, and closes."""

        self._raised: Exception | None = None
        """What the sink raised."""

        self.idle_since = 0.0

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            if self._fresh and len(self._unasked) + len(data) <= MAX_HEAD:
                self._unasked += data
            else:
                # Nobody asked for anything.
                self.abort()
            return
        try:
            body = reader.feed(data)
        except BadResponse as error:
            self._fail(error)
            return
        if body:
            self._take(body)
        if reader.complete or self._sink is None:
            self._wake()

    def eof_received(self) -> None:
        if self._reader is not None and self._error is None:
            try:
                self._reader.end()
            except BadResponse:
                self._error = ConnectionResetError("the worker closed the connection within its response")
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reader is not None and not self._reader.complete and self._error is None:
            self._error = exc or ConnectionResetError("the connection was closed")
        self._wake()

    def _take(self, body: bytes) -> None:
        if self._sink is not None:
            try:
                if self._sink(body):
                    self._sink = None
                    self._wake()
            except Exception as error:
                self._sink = None
                self._raised = error
                self._fail(error)
            return
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > HIGH_WATER:
            self._pause()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _pause(self) -> None:
        if self._transport is not None and self._open and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._transport is not None and self._open and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # The request's side

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def usable(self) -> bool:
        """For another request."""
        return self._open and self._reader is None

    async def ask(self, request: bytes) -> Head:
        """Send, and wait for the response's head. Raises OSError, BadResponse."""
        if self._unasked:
            return await self._refusal()
        if self._transport is None or not self.usable:
            raise ConnectionResetError("the connection was closed before it was used")
        self._fresh = False
        reader = self._reader = ResponseReader()
        self._transport.write(request)
        return await self._head(reader)

    async def _refusal(self) -> Head:
        """The head of what the worker said unasked. Nothing is sent: it reads no request."""
        unasked, self._unasked = self._unasked, b""
        reader = self._reader = ResponseReader()
        self.data_received(unasked)
        if not self._open:
            self.eof_received()
        head = await self._head(reader)
        if head.status < 400:
            raise BadResponse(f"status {head.status} before anything was asked")
        return head

    async def _head(self, reader: ResponseReader) -> Head:
        while reader.head is None:
            await self._wait()
        return reader.head

    async def read(self) -> bytes:
        """What has arrived of the body; b"" at its end. Raises OSError, BadResponse."""
        while not self._parts:
            if self.ended:
                return b""
            await self._wait()
        body = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        self._resume()
        return body

    async def push(self, sink: Sink) -> bool:
        """Give the body to `sink` as it arrives, until it has enough (True) or the body ends (False).

        Raises what `read` raises, and what `sink` does; the connection is closed then."""
        self._sink = sink
        try:
            if self._parts:
                self._take(await self.read())
            while self._sink is not None:
                if self.ended:
                    return False
                await self._wait()
            if self._raised is not None:
                raise self._raised
            # Also when the connection has broken since: what the sink took stands, and the next call says so.
            return True
        finally:
            self._sink = None

    @property
    def ended(self) -> bool:
        """The response is here to its end."""
        return self._reader is not None and self._reader.complete

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        await self._waiter

    def release(self) -> bool:
        """Make ready for the next request. False: it can't serve another.

        Nor can one whose worker answered before it had the whole request: it may close without reading the rest, and
        the next request would wait behind that."""
        reader, self._reader = self._reader, None
        whole = reader is None or (reader.complete and reader.keep)
        if self._transport is not None and self._transport.get_write_buffer_size():
            whole = False
        self._parts.clear()
        self._unread = 0
        self._resume()
        return whole and not self._fresh and self.usable

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Of all workers. A connection that has idled for `idle_seconds` is not used again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connect_seconds: float, idle_seconds: float) -> None:
        self._loop = loop
        self._connect_seconds = connect_seconds
        self._idle_seconds = idle_seconds
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def take(self, host: str, port: int) -> Connection:
        """An idle connection, the last used first, or a new one. Raises OSError, TimeoutError if it comes too late."""
        idle = self._idle.get((host, port), [])
        now = self._loop.time()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.idle_since < self._idle_seconds:
                return connection
            connection.abort()
        async with asyncio.timeout(self._connect_seconds):
            return await self._connect(host, port)

    async def _connect(self, host: str, port: int) -> Connection:
        _, connection = await self._loop.create_connection(lambda: Connection(self._loop), host, port)
        return connection

    def give_back(self, host: str, port: int, connection: Connection) -> None:
        """After its response was read. Closed when it can't serve again."""
        idle = self._idle.setdefault((host, port), [])
        if not connection.release() or len(idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_seconds, self._close_idle)

    def _close_idle(self) -> None:
        """Workers that are gone, and bursts that are over, leave no connections behind."""
        self._sweep = None
        limit = self._loop.time() - self._idle_seconds
        for address, idle in list(self._idle.items()):
            kept = [connection for connection in idle if connection.usable and connection.idle_since > limit]
            for connection in set(idle) - set(kept):
                connection.abort()
            if kept:
                idle[:] = kept
            else:
                del self._idle[address]
        if self._idle:
            self._sweep = self._loop.call_later(self._idle_seconds, self._close_idle)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
