"""A server's connections, within bounds that aiohttp does not have: how many there are, how long a request's head may
take, how long the end of an answer may wait for its reader. Errors of HTTP itself are OpenAI-shaped too."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

MAX_HEADER_LINE = 8190
MAX_HEADERS = 128
LINGERING_SECONDS = 2.0
"""How long a body that was refused is read and dropped, so that its sender gets to see why."""

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Of a client's request."""

MAX_LEG_BYTES = 2 * MAX_BODY_BYTES
"""Of a router's request to a worker: a client's body and what goes with it. The most of that are the ids of an answer
so far: 8 bytes each, a million of them."""

CONTINUE = "100-continue"
_REFUSED = ApiError(503, "too many connections; try again later", code="too_many_connections").json()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_REFUSED), _REFUSED)
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int = 4096
    header_seconds: float = 30.0
    """From the first byte of a request to the end of its head."""

    body_seconds: float = 60.0
    """From the end of the head to the end of the body; kept by whoever reads it."""

    idle_seconds: float = 75.0
    """Before the first request, and between requests (keep-alive)."""

    write_seconds: float = 30.0
    """A client that reads nothing for so long while output waits is cut off."""


class Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_finishing", "_flush_timer", "_head_timer", "_limits", "_wire")

    def __init__(self, manager: web.Server, limits: ConnectionLimits, *, loop: asyncio.AbstractEventLoop) -> None:
        options: dict[str, Any] = {
            "keepalive_timeout": limits.idle_seconds,
            "lingering_time": LINGERING_SECONDS,
            "max_line_size": MAX_HEADER_LINE,
            "max_field_size": MAX_HEADER_LINE,
            "max_headers": MAX_HEADERS,
            "access_log": None,
            "auto_decompress": False,  # compressed bodies are refused: unpacking one first is the client's to misuse
        }
        super().__init__(manager, loop=loop, **options)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._finishing = False
        """An answer's end is being written; aiohttp may wait there for its reader."""
        self._wire: asyncio.Transport | None = None
        """The transport, also after aiohttp has let go of it: closing waits for what is unread."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._manager is not None
        self._wire = cast(asyncio.Transport, transport)  # uvloop's is one in all but its base class
        if len(self._manager.connections) > self._limits.max_connections:
            self._wire.write(_REFUSAL)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._waiting_for_head():
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(self._limits.header_seconds, self._head_overdue)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _waiting_for_head(self) -> bool:
        """Idle between requests, maybe with the bytes of an unfinished head in the parser."""
        return self._waiter is not None and not self._waiter.done() and not self._messages

    def _head_overdue(self) -> None:
        self._head_timer = None
        if self._waiting_for_head():
            log.info("closing a connection whose request head took over %g s", self._limits.header_seconds)
            self.force_close()

    def retire(self) -> None:
        """Close now when idle, else after the answer under way."""
        if self._waiting_for_head():
            self.force_close()
        else:
            self.close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):
            # Raised by aiohttp outside of every handler: an Expect header that it does not know, say.
            error = ApiError(resp.status, resp.text or resp.reason)
            resp = web.Response(status=resp.status, body=error.json(), content_type="application/json")
        self._finishing = True
        self._watch_flush()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._finishing = False
            self._watch_flush()

    def _watch_flush(self) -> None:
        """The end of an answer may wait for its reader for ever: no handler has a deadline on it any more."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._wire is not None:
            waiting = self._wire.get_write_buffer_size()
            if waiting or self._finishing:
                self._flush_timer = self._loop.call_later(self._limits.write_seconds, self._flush_overdue, waiting)

    def _flush_overdue(self, left: int) -> None:
        """`left`: bytes that waited at the last look."""
        self._flush_timer = None
        if self._wire is None or (self._request_in_progress and not self._finishing):
            return  # the next request's handler writes, and waits within a deadline of its own
        if left and self._wire.get_write_buffer_size() >= left:
            log.info("cutting a connection that read nothing for %g s", self._limits.write_seconds)
            self._wire.abort()
        else:
            self._watch_flush()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._flush_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._flush_timer = self._wire = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """OpenAI-shaped also where HTTP itself is at fault (head too large, bad framing).

        Not logged there: the exception quotes what was sent, which may hold a key or a prompt. A client that left while
        its answer was written is no error, and gets none.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            log.error("request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        text = message or ("internal error" if status >= 500 else "malformed HTTP request")
        response = web.Response(status=status, body=ApiError(status, text).json(), content_type="application/json")
        response.force_close()
        return response


async def expect(request: web.BaseRequest) -> None:
    """Answer an Expect header. Raises ApiError 417 for what is not 100-continue."""
    expected = request.headers.get(hdrs.EXPECT)
    if expected is None:
        return
    if expected.lower() != CONTINUE:
        raise ApiError(417, f"expect: {expected[:100]!r} is not supported; only {CONTINUE} is", param="expect")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
