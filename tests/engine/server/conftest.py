"""One worker server over a FakeCore, on a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay_engine.server.app import build_app
from forebay_engine.server.listen import Listener
from forebay_engine.server.state import WorkerState
from forebay_engine.settings import WorkerSettings
from forebay_engine.text.simulated import SimulatedTokenizer
from forebay_wire import stream
from forebay_wire.connections import ConnectionLimits
from support.fake_core import FakeCore

SECRET = b"secret-of-the-tests"
CREATED = 1_800_000_000


class Worker:
    def __init__(self, core: FakeCore | None = None, limits: ConnectionLimits | None = None, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "name": "w1",
            "engine": "simulated",
            "served_name": "sim",
            "host": "127.0.0.1",
            "port": 0,
            "advertise_host": "10.0.0.7",
            "token_file": Path("unused"),
        }
        self.core = core or FakeCore()
        self.secret: bytes | None = SECRET
        self.settings = WorkerSettings(**{**settings, **changes})
        self._limits = limits
        self.bearer = {"authorization": f"Bearer {SECRET.decode()}"}

    async def __aenter__(self) -> Worker:
        self.state = WorkerState(
            self.settings, self.core, SimulatedTokenizer(), self.secret, wall=lambda: CREATED + 0.5, info=self.core.info
        )
        self.listener = Listener(build_app(self.state, self._limits))
        await self.listener.start("127.0.0.1", 0)
        self.state.port = self.listener.port
        self.url = f"http://127.0.0.1:{self.listener.port}"
        self.session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()
        self.state.closing.set()
        await self.listener.close()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, aiohttp.ClientResponse]:
        """Status, parsed JSON or raw bytes, response. Header names are written with underscores."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            raw = await response.read()
            parsed = json.loads(raw) if response.content_type == "application/json" else raw
            return response.status, parsed, response

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.get(self.url + path, headers=sent) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if response.content_type == "application/json" else raw


def sse(raw: bytes) -> list[tuple[list[int], list[bytes]]]:
    """Events of a stream: token ids and data payloads."""
    assert raw.endswith(b"\n\n")
    return [stream.parse(event) for event in raw[:-2].split(b"\n\n")]


def payloads(raw: bytes) -> list[str]:
    return [data.decode() for _, datas in sse(raw) for data in datas]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with Worker() as running:
        yield running


@pytest.fixture
def make_worker() -> type[Worker]:
    return Worker


@pytest.fixture
def parse_sse() -> Any:
    return sse
