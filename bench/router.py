"""What the router costs: processor time a relayed chunk and a request, and requests a second beside the bare worker.

One prefill and one decode worker, simulated, whose steps take 4 ms; the router between them and 16 clients. Processor
time is the router process's own, so a busy machine blurs it little: requests of 2 tokens (three legs: reserve, prefill,
decode) give `ms_per_request`, what 400 tokens cost more gives `us_per_chunk`,
and `us_per_lone_chunk` for one stream alone. `requests_per_second` and `added_ms`
compare the router with a connection straight to the decode worker, which then computes both phases; all on the cores
there are.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from bench.report import finish, percentile, spread
from forebay_engine.perf.model import PerfModel
from support.cluster import Cluster

CLIENTS = 16
SHORT_TOKENS = 2
LONG_TOKENS = 400
STEP_SECONDS = 0.004


def write_model(path: Path) -> None:
    """Steps of one length and no transfer time: chunks come paced, and in batches as a GPU's do."""
    model = PerfModel(
        name="paced",
        source="made-up",
        layers=4,
        kv_heads=4,
        head_size=64,
        overhead_seconds=STEP_SECONDS,
        transfer_bytes_per_second=0.0,
        kv_capacity_tokens=65_536,
        ttft_objective_seconds=1.0,
        tpot_objective_seconds=0.04,
    )
    path.write_bytes(msgspec.json.encode(model))


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Load:
    """Closed-loop clients that read streams to their ends."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model
        self._count = 0

    async def one(self, url: str, tokens: int) -> int:
        """The chunks of one stream. Raises RuntimeError when it is not whole."""
        self._count += 1
        prompt = f"request {self._count:08d}" * 4
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with self._session.post(f"{url}/v1/completions", data=msgspec.json.encode(body)) as response:
            raw = await response.content.read()
        if response.status != 200 or not raw.rstrip().endswith(b"[DONE]"):
            raise RuntimeError(f"status {response.status}: {raw[-300:]!r}")
        return raw.count(b'"text"')

    async def many(self, url: str, requests: int, tokens: int, clients: int = CLIENTS) -> int:
        """Chunks of so many requests, `clients` at a time."""
        left = requests
        chunks = 0

        async def client() -> None:
            nonlocal left, chunks
            while left > 0:
                left -= 1
                got = await self.one(url, tokens)
                chunks += got

        await asyncio.gather(*(client() for _ in range(clients)))
        return chunks


async def _timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds of the router."""

    request: float
    """Without its chunks."""

    chunk: float
    """Where those of CLIENTS streams come together, as a worker's step makes them."""

    lone_chunk: float
    """Where nothing else is under way."""


async def costs(load: Load, url: str, pid: int, requests: int) -> Costs:
    async def spent(count: int, tokens: int, clients: int) -> tuple[float, float]:
        """Processor seconds and chunks of a request."""
        before = cpu_seconds(pid)
        chunks = await load.many(url, count, tokens, clients)
        return (cpu_seconds(pid) - before) / count, chunks / count

    short, few = await spent(requests, SHORT_TOKENS, CLIENTS)
    long, many = await spent(CLIENTS, LONG_TOKENS, CLIENTS)
    alone, _ = await spent(1, LONG_TOKENS, 1)
    chunk = (long - short) / (many - few)
    return Costs(short - few * chunk, chunk, (alone - short) / (many - few))


async def bench(rounds: int, requests: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "paced.json")
        flags = ["--perf-model", str(folder / "paced.json")]
        async with Cluster(folder, worker_args=flags, router_args=["--convertible", "never"]) as cluster:
            load = Load(cluster.session, cluster.model)
            router, direct = cluster.router.url, cluster.workers["d0"].url
            found: list[Costs] = []
            rates: dict[str, list[float]] = {router: [], direct: []}
            alone: dict[str, list[float]] = {router: [], direct: []}
            for url in (router, direct):
                await load.many(url, CLIENTS, SHORT_TOKENS)
            for turn in range(rounds):
                found.append(await costs(load, router, cluster.router.pid, requests))
                for url in (router, direct) if turn % 2 else (direct, router):
                    rates[url].append(requests / await _timed(load.many(url, requests, SHORT_TOKENS)))
                    for _ in range(20):
                        alone[url].append(await _timed(load.one(url, SHORT_TOKENS)))
                print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        "bench": "router",
        "us_per_chunk": spread([1e6 * cost.chunk for cost in found]),
        "us_per_lone_chunk": spread([1e6 * cost.lone_chunk for cost in found]),
        "ms_per_request": spread([1e3 * cost.request for cost in found]),
        "requests_per_second": spread(rates[router]),
        "direct_requests_per_second": spread(rates[direct]),
        "added_ms_p50": round(1e3 * (percentile(alone[router], 0.5) - percentile(alone[direct], 0.5)), 3),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=320, help="short ones of a round")
    args = parser.parse_args()
    finish(uvloop.run(bench(args.rounds, args.requests)))


if __name__ == "__main__":
    main()
