"""A router in this process before fake workers on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay_router.app import Router
from forebay_router.discovery import View
from forebay_router.server import Listener
from forebay_router.settings import RouterSettings
from forebay_router.watchdog import LATE_SECONDS, TICK_SECONDS
from router.fake_worker import MODEL, TOKEN, FakeWorker
from support.cluster import until


class StaticDiscovery:
    """The test says when the view changes."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[View] = asyncio.Queue()

    def show(self, workers: list[FakeWorker]) -> None:
        self._queue.put_nowait(tuple(worker.endpoint for worker in workers))

    async def run(self, on_view: Callable[[View], None]) -> None:
        while True:
            on_view(await self._queue.get())


PATIENCE = LATE_SECONDS + TICK_SECONDS + 0.05
"""With less, the router takes a stand-still of this process, which the fake workers share, for one of a worker's: it
makes allowance for a tick of its own that comes LATE_SECONDS late, no sooner."""


def settings(**changes: Any) -> RouterSettings:
    values: dict[str, Any] = {
        "name": "router",
        "host": "127.0.0.1",
        "port": 0,
        "workers_file": Path("unused"),
        "token": TOKEN.encode(),
        "served_name": MODEL,
        "stall_timeout": 1.0,
        "suspect_after": PATIENCE,
        "suspect_stall": PATIENCE,
        "prefill_timeout": 20.0,
        "reserve_timeout": 0.5,
        "request_timeout": 30.0,
    }
    return RouterSettings(**{**values, **changes})


class Bench:
    """Router, workers and a client session of one test."""

    def __init__(self, config: RouterSettings) -> None:
        self.config = config
        self.workers: dict[str, FakeWorker] = {}
        self.discovery = StaticDiscovery()

    async def start(self, roles: dict[str, str | None]) -> None:
        for name, role in roles.items():
            self.workers[name] = FakeWorker(name, role)
            await self.workers[name].start()
        self.router = Router(self.config, self.discovery, random.Random(7))
        self.listener = Listener(self.router.handle, self.config)
        self._server = await asyncio.get_running_loop().create_server(self.listener, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.router.start()
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        self.show()
        await self.settled()

    def show(self) -> None:
        self.discovery.show(list(self.workers.values()))

    def __getitem__(self, name: str) -> FakeWorker:
        return self.workers[name]

    async def settled(self) -> None:
        """The router has a report of every worker."""

        async def known() -> bool:
            return len(self.router.workers) == len(self.workers) and all(
                worker.report is not None for worker in self.router.workers
            )

        await until(known, "a report of every worker", 5)

    async def state(self, name: str, state: str, seconds: float = 5) -> None:
        async def reached() -> bool:
            load = await self.load()
            return any(w["name"] == name and w["state"] == state for w in load["workers"])

        await until(reached, f"{name} is {state}", seconds)

    async def load(self) -> dict[str, Any]:
        async with self.session.get(self.url + "/load") as response:
            assert response.status == 200
            return dict(await response.json())

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def close(self) -> None:
        await self.session.close()
        self._server.close()
        await self.listener.shutdown(0.1)
        for worker in self.workers.values():
            await worker.die()
        await self.router.close()


StartBench = Callable[..., Awaitable[Bench]]


@pytest.fixture
async def start_bench() -> AsyncIterator[StartBench]:
    """start_bench(p="prefill", ..., **settings): names with a role are workers, the rest are settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(roles: dict[str, str | None] | None = None, **changes: Any) -> Bench:
            bench = Bench(settings(**changes))
            stack.push_async_callback(bench.close)
            default: dict[str, str | None] = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
            await bench.start(default if roles is None else roles)
            return bench

        yield start
