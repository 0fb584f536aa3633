"""An application on a socket, within its connection limits."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from forebay_engine.server.http import GUARD, error_response
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

BACKLOG = 1024
CLOSE_SECONDS = 1.0
"""For handlers still running when the listener is closed, once to end by themselves and once to be cancelled."""

_LINGER_SECONDS = 2.0
"""After an early error the rest of a body is read and dropped so long, so that the client gets to read the error."""


class Connection(RequestHandler):
    """One client connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """OpenAI-shaped also where HTTP itself is at fault. Not logged there: the exception quotes what was sent, which
        may hold a token or a prompt. A client that left while its answer was written is no error, and gets none."""
        if isinstance(exc, ConnectionError):
            raise exc
        if status >= 500:
            log.error("request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        response = error_response(ApiError(status, message or "malformed HTTP request"))
        response.force_close()
        return response


class Listener:
    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._guard = app[GUARD]
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when the address can't be had."""
        # A client that leaves cancels its handler, and with it the request in the core.
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        loop = asyncio.get_running_loop()
        arguments: dict[str, Any] = {
            "access_log": None,
            "keepalive_timeout": self._guard.limits.idle_seconds,
            "lingering_time": _LINGER_SECONDS,
        }

        def connection() -> Connection:
            return Connection(manager, loop=loop, **arguments)

        try:
            self._server = await loop.create_server(
                self._guard.wrap(connection), host, port, backlog=BACKLOG, reuse_address=True
            )
        except BaseException:
            await self._runner.cleanup()
            raise
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
