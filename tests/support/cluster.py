"""Real workers and a real router on free ports, for tests that kill, stop and watch them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from forebay_wire.discovery import WorkerEntry, WorkersFile
from forebay_wire.load import LoadReport

START_SECONDS = 60.0
TOKEN = "test-token-of-one-model"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float, period: float = 0.02) -> float:
    """Poll until true; returns how long it took, fails with `what` after `seconds`."""
    started = time.monotonic()
    while not await condition():
        if time.monotonic() - started > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(period)
    return time.monotonic() - started


@dataclass
class Process:
    name: str
    port: int
    command: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal_all(self, number: int) -> None:
        """To the whole session: a native worker is two processes."""
        os.killpg(self.pid, number)

    async def kill(self) -> None:
        self.signal_all(signal.SIGKILL)
        await self.wait()

    def stop(self) -> None:
        self.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal_all(signal.SIGCONT)

    async def wait(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    async def end(self) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        try:
            self.signal_all(signal.SIGCONT)
            self.signal_all(signal.SIGKILL)
        except ProcessLookupError:
            pass
        await self.wait()


class Cluster:
    """`prefill` + `decode` workers and one router. Names are p0, p1, ..., d0, d1, ..."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        engine: str = "simulated",
        model_dir: Path | None = None,
        worker_args: list[str] | None = None,
        router_args: list[str] | None = None,
        with_router: bool = True,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.token_file.chmod(0o600)
        self.workers_file = folder / "workers.json"
        self.model = "smollm2" if engine == "native" else "simulated"
        source = ["--model-dir", str(model_dir)] if model_dir is not None else []
        self.workers: dict[str, Process] = {}
        self.roles: dict[str, str] = {}
        for pool, count in (("prefill", prefill), ("decode", decode)):
            for index in range(count):
                name = f"{pool[0]}{index}"
                port = free_port()
                command = [
                    *(sys.executable, "-m", "forebay_engine.main", "--type", engine, *source),
                    *("--served-name", self.model, "--name", name, "--host", "127.0.0.1", "--port", str(port)),
                    *("--advertise-host", "127.0.0.1", "--token-file", str(self.token_file)),
                    *(worker_args or []),
                ]
                self.workers[name] = Process(name, port, command, folder / f"{name}.log")
                self.roles[name] = pool
        port = free_port()
        self.router = Process(
            "router",
            port,
            [
                *(sys.executable, "-m", "forebay_router.main", "--host", "127.0.0.1", "--port", str(port)),
                *("--workers-file", str(self.workers_file), "--token-file", str(self.token_file)),
                # A test that is about something else gets the plain two legs.
                *("--served-name", self.model, "--name", "router", "--convertible", "never", *(router_args or [])),
            ],
            folder / "router.log",
        )
        self._with_router = with_router

    def write_workers(self) -> None:
        """Atomically, as local mode does."""
        entries = [
            WorkerEntry(name=w.name, host="127.0.0.1", port=w.port, pool=self.roles[n], role=self.roles[n])
            for n, w in self.workers.items()
        ]
        temporary = self.workers_file.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(WorkersFile(workers=entries)))
        temporary.replace(self.workers_file)

    async def __aenter__(self) -> Cluster:
        self.session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            self.write_workers()
            for worker in self.workers.values():
                await worker.start()
            if self._with_router:
                await self.router.start()
            for worker in self.workers.values():
                await self.ready(worker)
            if self._with_router:
                await self.ready(self.router)
                await until(self._all_known, "the router knows every worker", START_SECONDS)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for process in (self.router, *self.workers.values()):
            await process.end()
        await self.session.close()

    async def ready(self, process: Process) -> float:
        async def answers() -> bool:
            if process.process is not None and process.process.returncode is not None:
                raise AssertionError(f"{process.name} ended early:\n{process.log.read_text()[-3000:]}")
            try:
                async with self.session.get(process.url + "/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        return await until(answers, f"{process.name} ready, see {process.log}", START_SECONDS, 0.05)

    async def _all_known(self) -> bool:
        loads = await self.router_loads()
        return all(loads.get(name, {}).get("ready") for name in self.workers)

    async def router_load(self) -> dict[str, Any]:
        async with self.session.get(self.router.url + "/load") as response:
            return dict(await response.json())

    async def router_loads(self) -> dict[str, dict[str, Any]]:
        """The router's view of each worker's LoadReport, by name; {} where it has none."""
        load = await self.router_load()
        return {worker["name"]: worker.get("load") or {} for worker in load["workers"]}

    @property
    def internal(self) -> dict[str, str]:
        return {"authorization": f"Bearer {TOKEN}"}

    async def load(self, name: str) -> LoadReport:
        """A worker's own load, fresh from it."""
        async with self.session.get(self.workers[name].url + "/internal/load", headers=self.internal) as response:
            line = await response.content.readline()
        return msgspec.json.decode(line, type=LoadReport)

    async def assert_nothing_left(self, *names: str, seconds: float = 5.0) -> None:
        """Every block free, no lease, nothing running on the named workers (all when none is named)."""

        async def empty() -> bool:
            self._last = {name: await self.load(name) for name in names or self.workers}
            return all(
                load.running == load.waiting == load.waiting_pulls == load.held_blocks == 0
                and load.free_blocks == load.total_blocks
                for load in self._last.values()
            )

        try:
            await until(empty, "workers empty", seconds)
        except AssertionError as error:
            raise AssertionError(f"left behind: {self._last}") from error
