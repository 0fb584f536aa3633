"""An owner in a process of its own, a reader in this one."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine.transfer.arena import BLOCK_BYTES, BLOCK_SIZE, Arena, compatibility
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_engine.types import PullSource

TOKEN = "owner-token"
LEASE = 6.0
START_SECONDS = 60.0

StartOwner = Callable[..., Awaitable["Owner"]]
StartReader = Callable[..., Awaitable["Reader"]]


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

    def __init__(self, kind: str, *, blocks: int, block_bytes: int, lease: float, dtype: str) -> None:
        self.kind = kind
        self.lease = lease
        self.dtype = dtype
        self.port = 0
        self.engine_id = ""
        self.reusable = True
        """False once a test stopped or ended it."""
        self._args = [kind, blocks, block_bytes, lease, dtype]

    def launch(self) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("owner_process.py")),
                *(str(arg) for arg in (*self._args, self.port)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    async def ready(self) -> None:
        """Until it listens, with nothing left of an earlier test."""
        if not self.port:
            assert self.process.stdout is not None
            descriptor = self.process.stdout.fileno()
            await asyncio.to_thread(select.select, [descriptor], [], [], START_SECONDS)
            line = os.read(descriptor, 64) if select.select([descriptor], [], [], 0)[0] else b""
            assert line, "the owner process did not start"
            self.port = int(line)
        self.engine_id = (await self.call("reset"))["engine_id"]

    async def restart(self) -> None:
        """Another process, another engine, the same address."""
        self.kill()
        self.launch()

        async def listens() -> bool:
            try:
                await self.ready()
            except aiohttp.ClientError:
                return False
            return True

        await until(listens, "the owner listens again", START_SECONDS)

    async def call(self, name: str, **body: Any) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session,
            session.post(
                f"http://127.0.0.1:{self.port}/test/{name}",
                data=msgspec.json.encode(body),
                timeout=aiohttp.ClientTimeout(10),
            ) as answer,
        ):
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

    def pause(self) -> None:
        """Returns when each of its threads has stopped: one that still ran could answer a read."""
        self.reusable = False
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        end = time.monotonic() + START_SECONDS
        while any(_state(task) not in "TtZX" for task in tasks.iterdir()):
            assert time.monotonic() < end, "the owner process does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.reusable = False
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """Orderly end; returns its exit code."""
        self.reusable = False
        if self.process.returncode is None:
            self.resume()
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return self.process.returncode


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
        )


def _state(task: Path) -> str:
    """One letter, as in proc(5); X for a thread that is gone."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
