"""/healthz, /readyz and /metrics of the operator."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from forebay_operator.metrics import CONTENT_TYPE, OperatorMetrics

Check = Callable[[], str | None]
"""What is wrong, or None."""


class HealthServer:
    def __init__(self, host: str, port: int, metrics: OperatorMetrics, alive: Check) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._alive = alive
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The one listened on: another than asked for when that was 0."""
        assert self._runner is not None
        port: int = self._runner.addresses[0][1]
        return port

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._text)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        wrong = self._alive()
        return web.Response(text=wrong or "ok", status=500 if wrong else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        """A standby is ready too: else a rollout of the operator would wait for a Lease that the old pod holds."""
        return web.Response(text="ok")

    async def _text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"content-type": CONTENT_TYPE})
