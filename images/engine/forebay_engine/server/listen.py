"""An application on a socket, within its connection limits."""

from __future__ import annotations

import asyncio

from aiohttp import web

from forebay_engine.server.http import LIMITS
from forebay_wire.connections import Connection

BACKLOG = 1024
CLOSE_SECONDS = 1.0
"""For handlers still running when the listener is closed, once to end by themselves and once to be cancelled."""


class Listener:
    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._limits = app[LIMITS]
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

        def connection() -> Connection:
            return Connection(manager, self._limits, loop=loop)

        try:
            self._server = await loop.create_server(connection, host, port, backlog=BACKLOG, reuse_address=True)
        except BaseException:
            await self._runner.cleanup()
            raise
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def connections(self) -> int:
        """Open ones."""
        manager = self._runner.server if self._runner is not None else None
        return len(manager.connections) if manager is not None else 0

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
