"""Owners in processes of their own, a reader in this one."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_engine.types import PullSource

sys.path.insert(0, str(Path(__file__).parent))
from arena import BLOCK_BYTES, BLOCK_SIZE, Arena, compatibility

TOKEN = "owner-token"
LEASE = 6.0


async def until(condition: Callable[[], Awaitable[bool] | bool], what: str, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.01)


class Owner:
    """One owner process; `call` drives its /test endpoints."""

    def __init__(self, kind: str, *, blocks: int, block_bytes: int, lease: float, bandwidth: float, dtype: str) -> None:
        self._args = [kind, blocks, block_bytes, lease, bandwidth, dtype]
        self.kind = kind
        self.lease = lease
        self.dtype = dtype
        self.port = 0
        self.engine_id = ""
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("owner_process.py")),
            *(str(arg) for arg in (*self._args, self.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 30)
        assert line, "the owner process died at its start"
        self.port = int(line)
        self._session = aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"})
        self.engine_id = (await self.call("state"))["engine_id"]

    async def call(self, name: str, **body: Any) -> dict[str, Any]:
        assert self._session is not None
        url = f"http://127.0.0.1:{self.port}/test/{name}"
        async with self._session.post(url, data=msgspec.json.encode(body), timeout=aiohttp.ClientTimeout(10)) as answer:
            assert answer.status == 200, await answer.text()
            return msgspec.json.decode(await answer.read(), type=dict[str, Any])

    async def grant(self, request_id: str, blocks: list[int]) -> PullSource:
        """A finished prefill: `blocks` leased out under `request_id`."""
        await self.call("begin", request_id=request_id)
        answer = await self.call("grant", request_id=request_id, blocks=blocks, num_tokens=len(blocks) * BLOCK_SIZE)
        return self.source(request_id, blocks, answer["epoch"])

    def source(self, request_id: str, blocks: list[int], epoch: int) -> PullSource:
        return PullSource(
            engine_id=self.engine_id,
            request_id=request_id,
            host="127.0.0.1",
            port=self.port,
            block_ids=blocks,
            num_tokens=len(blocks) * BLOCK_SIZE,
            epoch=epoch,
            compat_hash=compat_hash(compatibility(self.dtype)),
            lease_seconds=self.lease,
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self._session is not None:
            await self._session.close()

    async def stop(self) -> int:
        """Orderly end; returns its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 20)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._session is not None:
            await self._session.close()
        return self.process.returncode or 0


StartOwner = Callable[..., Awaitable[Owner]]


@pytest.fixture
async def start_owner() -> AsyncIterator[StartOwner]:
    owners: list[Owner] = []

    async def start(
        kind: str,
        *,
        blocks: int = 512,
        block_bytes: int = BLOCK_BYTES,
        lease: float = LEASE,
        bandwidth: float = 1e9,
        dtype: str = "float32",
    ) -> Owner:
        owner = Owner(kind, blocks=blocks, block_bytes=block_bytes, lease=lease, bandwidth=bandwidth, dtype=dtype)
        owners.append(owner)
        await owner.start()
        return owner

    yield start
    for owner in owners:
        if hasattr(owner, "process"):
            await owner.stop()


class Reader:
    """A decode worker without a model."""

    def __init__(
        self,
        kind: str,
        *,
        blocks: int = 512,
        block_bytes: int = BLOCK_BYTES,
        bandwidth: float = 1e9,
        lease: float = LEASE,
        pull_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arena = Arena(kind, blocks, block_bytes, bandwidth)
        self.transport = self.arena.transport()
        self.freed: list[tuple[int, ...]] = []
        self.expired: list[tuple[int, ...]] = []
        self.leases = LeaseTable(lease)
        self.service = TransferService(
            identity=Identity(
                engine_id=f"reader-{uuid.uuid4().hex}",
                compatibility=compatibility(),
                transport="simulated" if kind == "simulated" else "nixl",
                base_address=self.arena.address,
                block_bytes=block_bytes,
                num_blocks=blocks,
            ),
            transport=self.transport,
            leases=self.leases,
            peers=PeerClient(TOKEN),
            on_freed=self.freed.append,
            on_expired=self.expired.append,
            pull_timeout_seconds=pull_timeout,
            clock=clock,
        )


StartReader = Callable[..., Awaitable[Reader]]


@pytest.fixture
async def start_reader() -> AsyncIterator[StartReader]:
    readers: list[Reader] = []

    async def start(kind: str, **options: Any) -> Reader:
        reader = Reader(kind, **options)
        readers.append(reader)
        await reader.service.start()
        return reader

    yield start
    for reader in readers:
        await reader.service.stop()
