"""The client side of HTTP: bounded bodies, read in time, and writes that never wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.http import StreamWriter
from aiohttp.web_protocol import RequestHandler

from forebay_router.client_side import ClientGone
from forebay_router.settings import RouterSettings
from forebay_wire.connections import Connection, ConnectionLimits, expect
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Take = Callable[[int], None]


class Listener(web.Server):
    """Makes connections. A handler is cancelled when its client goes (R7)."""

    def __init__(self, handler: Handler, settings: RouterSettings) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._limits = ConnectionLimits(
            max_connections=settings.max_connections,
            header_seconds=settings.header_timeout,
            body_seconds=settings.body_timeout,
            idle_seconds=settings.keepalive_timeout,
            write_seconds=settings.write_timeout,
        )

    def retire(self) -> None:
        """Take no further request on any connection."""
        for connection in self.connections:
            cast(Connection, connection).retire()

    def __call__(self) -> RequestHandler:
        return Connection(self, self._limits, loop=self._loop)


class BodyRoom:
    """Bounds the bytes of all request bodies that are held, those half read included."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[Take]:
        """Around one request. `take(size)` before each part is kept; raises ApiError 503 when there is no room."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self._taken + size > self._limit:
                raise ApiError(503, "the bodies of other requests take all the room; try again later", retry_after=1.0)
            self._taken += size
            held += size

        try:
            yield take
        finally:
            self._taken -= held


async def read_body(request: web.BaseRequest, settings: RouterSettings, take: Take) -> bytes:
    """The request's body. Raises ApiError: 413 as soon as it is known to be too large, 408 when it does not come, 400
    when it is compressed or cut short, 503 when there is no room for it."""
    limit = settings.max_body
    too_large = ApiError(413, f"the request body is over {limit} bytes; shorten it")
    if request.content_length is not None and request.content_length > limit:
        raise too_large
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise ApiError(400, "a compressed request body is not supported; send it as it is")
    await expect(request)
    parts: list[bytes] = []
    size = 0
    try:
        if request.content.is_eof():
            # It is all here, as short ones are: nothing to wait for.
            body = request.content.read_nowait()
            if len(body) > limit:
                raise too_large
            take(len(body))
            return body
        async with asyncio.timeout(settings.body_timeout):
            while True:
                async with asyncio.timeout(settings.body_idle_timeout):
                    chunk = await request.content.readany()
                if not chunk:
                    return b"".join(parts)
                size += len(chunk)
                if size > limit:
                    raise too_large
                take(len(chunk))
                parts.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the request body did not come: {size} bytes read") from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the request body cannot be read: {error}") from error


class HttpClientSide:
    """ClientSide (client_side.py) over aiohttp.web."""

    def __init__(self, request: web.BaseRequest, write_timeout: float) -> None:
        self._request = request
        self._protocol = request.protocol
        self._write_timeout = write_timeout
        self._writer: StreamWriter | None = None
        self.started = False
        self.response: web.StreamResponse = web.Response(status=500)
        """What the handler returns to aiohttp in the end."""

    async def start(self, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers={**headers, hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8"})
        # The head goes out with the first bytes: one packet, and an error before them may still be a status.
        self.response._send_headers_immediately = False
        try:
            self._writer = cast(StreamWriter, await self.response.prepare(self._request))
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        self.started = True

    async def write(self, data: bytes) -> None:
        assert self._writer is not None
        try:
            await self._writer.write(data, drain=False)
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        await self.drain()

    def write_now(self, data: bytes) -> bool:
        # aiohttp's writer takes a coroutine for each write; its framing is all that is needed here.
        assert self._writer is not None
        transport = self._open_transport(self._writer)
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._writer.chunked else data)
        return not self._protocol.writing_paused

    async def drain(self) -> None:
        assert self._writer is not None
        if self._protocol.writing_paused:
            await self._guarded(self._writer.drain())
        self._open_transport(self._writer)

    @staticmethod
    def _open_transport(writer: StreamWriter) -> asyncio.Transport:
        transport = writer.transport
        if transport is None or transport.is_closing():
            raise ClientGone("its connection is closed")
        return transport

    async def finish(self, last: bytes = b"") -> None:
        await self._guarded(self.response.write_eof(last))

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.response = web.Response(status=status, headers=headers, body=body)
        if status in (408, 413):
            self.response.force_close()
        await self._guarded(self.response.prepare(self._request))
        await self._guarded(self.response.write_eof())

    async def _guarded(self, work: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._write_timeout):
                return await work
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        except TimeoutError as error:
            raise ClientGone(f"it has read nothing for {self._write_timeout:g} s") from error

    def abort(self) -> None:
        if self._protocol.transport is not None:
            self._protocol.transport.abort()
