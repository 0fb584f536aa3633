"""An application on a socket, within its connection limits."""

from __future__ import annotations

import asyncio

from aiohttp import web

from forebay_engine.server.http import GUARD

BACKLOG = 1024
CLOSE_SECONDS = 1.0
"""For handlers still running when the listener is closed, once to end by themselves and once to be cancelled."""

_LINGER_SECONDS = 2.0
"""After an early error the rest of a body is read and dropped so long, so that the client gets to read the error."""


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
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._guard.limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await self._runner.setup()
        factory = self._runner.server
        assert factory is not None
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._guard.wrap(factory), host, port, backlog=BACKLOG, reuse_address=True
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
