"""The suite's client, as a pod: it goes through the Service and cluster DNS, as users' programs do.

It runs in the router's image with this file, e2e/traffic.py and tests/support/client.py mounted from a ConfigMap, and
is told what to do by HTTP through the API server.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import aiohttp
from aiohttp import web

from e2e.traffic import Traffic
from support.client import complete

PORT = 9000
RETRY_SECONDS = 0.25


class Client:
    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120, sock_connect=3),
            # One connection a request: each is sent to some router by the Service anew.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        self._traffic: Traffic | None = None

    async def complete(self, request: web.Request) -> web.Response:
        """{url, body, patience_s}: one request, tried again until the service answers 200 or patience ends."""
        asked = await request.json()
        deadline = asyncio.get_running_loop().time() + asked.get("patience_s", 0)
        tries = 0
        while True:
            tries += 1
            try:
                answer: dict[str, Any] = asdict(await complete(self._session, asked["url"], asked["body"]))
            except (aiohttp.ClientError, OSError) as error:
                answer = {"status": 0, "error": f"{type(error).__name__}: {error}"}
            if answer["status"] == 200 or asyncio.get_running_loop().time() > deadline:
                return web.json_response({**answer, "tries": tries})
            await asyncio.sleep(RETRY_SECONDS)

    async def start(self, request: web.Request) -> web.Response:
        """{url, model, streams, tokens}: learn the right answers, then begin."""
        if self._traffic is not None:
            await self._traffic.stop()
        self._traffic = Traffic(**await request.json())
        await self._traffic.learn(self._session)
        await self._traffic.start(self._session)
        return self._state()

    async def state(self, request: web.Request) -> web.Response:
        return self._state()

    async def stop(self, request: web.Request) -> web.Response:
        """The last report, or null without traffic."""
        if self._traffic is not None:
            await self._traffic.stop()
        report = self._state()
        self._traffic = None
        return report

    def _state(self) -> web.Response:
        return web.json_response(self._traffic.report() if self._traffic is not None else None)


async def main() -> None:
    client = Client()
    app = web.Application()
    app.add_routes([
        web.post("/complete", client.complete),
        web.post("/traffic", client.start),
        web.get("/traffic", client.state),
        web.delete("/traffic", client.stop),
    ])  # fmt: skip
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", PORT).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
