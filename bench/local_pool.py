"""A `forebay up` of simulated workers, and an open-loop client that asks less of the machine than what it measures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import yaml

from forebay_operator.api.load import load_manifest
from forebay_operator.local.containers import pool_sizes
from forebay_operator.local.control import Control
from forebay_operator.local.errors import LocalError
from forebay_operator.local.ports import Ports
from forebay_operator.local.rescaling import MEMORY
from forebay_operator.local.state import StateFolder
from forebay_operator.local.status import UpStatus

READY_SECONDS = 60.0
NAME = "bench"


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come: when, in seconds from the start, and its tokens."""

    at: float
    prompt: int
    output: int


@dataclass(slots=True)
class Sent:
    planned: Planned
    sent: float
    status: int = 0
    first: float | None = None
    last: float | None = None
    prefill: str = ""
    decode: str = ""

    def met(self, ttft: float, tpot: float) -> bool:
        """Design section 6: both objectives held; what was refused or failed has missed."""
        if self.status != 200 or self.first is None or self.last is None:
            return False
        each = (self.last - self.first) / (self.planned.output - 1) if self.planned.output > 1 else 0.0
        return self.first - self.sent <= ttft and each <= tpot


def poisson(rng: random.Random, begin: float, end: float, rate: float, prompt: int, output: int) -> list[Planned]:
    """Arrivals at `rate` per second; lengths within a fifth of the given ones."""
    at, found = begin, []
    while (at := at + rng.expovariate(rate)) < end:
        found.append(Planned(at, round(prompt * rng.uniform(0.8, 1.2)), max(2, round(output * rng.uniform(0.8, 1.2)))))
    return found


def manifest(
    prefill: int, decode: int, *, ttft_ms: int, tpot_ms: int, mode: str = "Auto", convertible: bool = False
) -> dict[str, Any]:
    return {
        "apiVersion": "serving.forebay.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"servedName": "simulated", "maxModelLen": 8192},
            "engine": {
                "type": "Simulated",
                "simulated": {"performanceModel": "slow"},
                "maxBatchedTokens": 2048,
                "maxRunningRequests": 256,
            },
            "objectives": {"timeToFirstTokenMilliseconds": ttft_ms, "timePerOutputTokenMilliseconds": tpot_ms},
            "scaling": {"mode": mode},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "router": {"replicas": 1, "convertible": "Overflow" if convertible else "Never"},
            "drain": {"timeoutSeconds": 5},
        },
    }


class LocalPool:
    def __init__(self, state: StateFolder, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._state = state
        self._process = process

    async def status(self) -> UpStatus:
        return await Control(self._state).status()

    async def ratio(self, ratio: str) -> None:
        await Control(self._state).ratio(ratio)

    def cpu_seconds(self) -> float:
        """Of `up`, its router and its workers so far."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total


@contextlib.asynccontextmanager
async def local_pool(folder: Path, model: dict[str, Any], memory: bytes | None = None) -> AsyncIterator[LocalPool]:
    """`forebay up` in `folder`, ready; ended when the context is left. `memory`: what an earlier run learnt."""
    file = folder / "model.yaml"
    file.write_text(yaml.safe_dump(model))
    state = StateFolder(NAME, folder / "forebay")
    state.create()
    if memory is not None:
        (state.path / MEMORY).write_bytes(memory)
    count = 1 + sum(pool_sizes(load_manifest(file.read_text(), str(file)).model).values())
    ports = Ports("127.0.0.1")
    try:
        port = ports.find(random.randint(20000, 30000), count)[0]
    finally:
        ports.close()
    log = (folder / "up.log").open("wb")
    command = [sys.executable, "-m", "forebay_operator.cli", "up", str(file), "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "XDG_STATE_HOME": str(folder)}
    )
    pool = LocalPool(state, port, process)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(LocalError):
                if (await pool.status()).ready:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"not ready:\n{(folder / 'up.log').read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        yield pool
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, 15)
        log.close()


async def play(url: str, plan: Iterable[Planned], seed: int) -> list[Sent]:
    """Send every request at its time, however late the answers are. Prompts share no beginning: nothing is cached."""
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    started = time.monotonic()
    tasks = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        for planned in plan:
            text = "".join(rng.choices(string.ascii_letters, k=planned.prompt))
            await asyncio.sleep(max(0.0, started + planned.at - time.monotonic()))
            tasks.append(asyncio.create_task(_ask(session, url, planned, text)))
        return list(await asyncio.gather(*tasks))


async def _ask(session: aiohttp.ClientSession, url: str, planned: Planned, prompt: str) -> Sent:
    body = {
        "model": "simulated",
        "prompt": prompt,
        "max_tokens": planned.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent = Sent(planned, time.monotonic())
    try:
        async with session.post(url + "/v1/completions", data=msgspec.json.encode(body)) as response:
            sent.status = response.status
            sent.prefill = response.headers.get("x-forebay-prefill", "")
            sent.decode = response.headers.get("x-forebay-decode", "")
            async for part in response.content.iter_any():
                if b'"text"' in part:
                    sent.last = time.monotonic()
                    sent.first = sent.first or sent.last
                if b'"error"' in part:
                    sent.status = 500
    except (aiohttp.ClientError, TimeoutError):
        sent.status = 599
    return sent
