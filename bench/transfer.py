"""What a hand-off costs: `python -m bench.transfer` prints one JSON object as its last line.

Two processes, the whole pull path (lease, read, confirmation) beside the two things it can't beat, on the
same blocks and interleaved A B C B A: NIXL called directly, and a memory copy by one thread. A block is SmolLM2-135M's
in float32.

Keys: `over_nixl` and `over_memcpy` are the pull's bytes/s over theirs at 2048 tokens, the median over rounds of the
ratio within a round; `handoff_ms_p50` is what a pull of 512 tokens takes beyond its bytes at NIXL's speed. `sizes` has
every size; spreads are (p90 - p10) / p50. `idle_cpu_percent`: of one core, an owner process with nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from typing import Any

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import uvloop
from aiohttp import web

from forebay_engine.core.processes import exit_now
from forebay_engine.kv.lease_words import LeaseWords
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.nixl import NixlTransport
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_engine.types import PullSource
from forebay_wire import paths
from forebay_wire.messages import Compatibility, HeartbeatRequest, LeaseRef

BLOCK_SIZE = 16
BLOCK_BYTES = 737_280
NUM_BLOCKS = 320
TOKENS = (128, 512, 2048)
LEASE_SECONDS = 30.0
COMPATIBILITY = Compatibility("bench", "smollm2", "float32", 30, 3, 64, BLOCK_SIZE, "bench")


class Side:
    """A worker's transfer half, without a model."""

    def __init__(self, kind: str, fill: int) -> None:
        self.blocks: npt.NDArray[np.uint8] = np.full((NUM_BLOCKS, BLOCK_BYTES), fill, dtype=np.uint8)
        self.engine_id = uuid.uuid4().hex
        words = LeaseWords(self.engine_id)
        self.leases = LeaseTable(LEASE_SECONDS, words)
        self.transport = NixlTransport(
            address=int(self.blocks.ctypes.data),
            block_bytes=BLOCK_BYTES,
            num_blocks=NUM_BLOCKS,
            transport=kind,
            words=words,
            keepalive=self.blocks,
        )
        self.service = TransferService(
            identity=Identity(
                self.engine_id, COMPATIBILITY, "nixl", int(self.blocks.ctypes.data), BLOCK_BYTES, NUM_BLOCKS
            ),
            transport=self.transport,
            leases=self.leases,
            peers=PeerClient("bench"),
            on_freed=lambda blocks: None,
            on_expired=lambda blocks: None,
            pull_timeout_seconds=20.0,
        )


async def owner(kind: str) -> None:
    """The child process: prints its port, ends when its standard input closes."""
    side = Side(kind, 1)
    await side.service.start()

    def answer(value: object) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    async def handshake(_: web.Request) -> web.Response:
        return answer(side.service.handshake())

    async def heartbeat(request: web.Request) -> web.Response:
        return answer(side.service.heartbeat(msgspec.json.decode(await request.read(), type=HeartbeatRequest).leases))

    async def complete(request: web.Request) -> web.Response:
        return answer(side.service.complete(msgspec.json.decode(await request.read(), type=LeaseRef)))

    async def grant(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        side.leases.begin(body["request_id"])
        tokens = len(body["blocks"]) * BLOCK_SIZE
        lease = side.leases.grant(body["request_id"], body["blocks"], tokens, time.monotonic())
        side.service.wake()
        return answer({"epoch": lease.epoch, "engine_id": side.engine_id})

    app = web.Application()
    app.router.add_get(paths.HANDSHAKE, handshake)
    app.router.add_post(paths.LEASE_HEARTBEAT, heartbeat)
    app.router.add_post(paths.LEASE_COMPLETE, complete)
    app.router.add_post("/bench/grant", grant)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    exit_now(0)


class Bench:
    def __init__(self, side: Side, port: int, session: aiohttp.ClientSession) -> None:
        self.side = side
        self.port = port
        self.session = session
        self.source_copy = np.full((NUM_BLOCKS, BLOCK_BYTES), 1, dtype=np.uint8)
        self.random = np.random.default_rng(0)

    async def grant(self, blocks: list[int]) -> PullSource:
        request_id = uuid.uuid4().hex
        body = msgspec.json.encode({"request_id": request_id, "blocks": blocks})
        async with self.session.post(f"http://127.0.0.1:{self.port}/bench/grant", data=body) as response:
            answer = msgspec.json.decode(await response.read())
        return PullSource(
            engine_id=answer["engine_id"],
            request_id=request_id,
            host="127.0.0.1",
            port=self.port,
            block_ids=blocks,
            num_tokens=len(blocks) * BLOCK_SIZE,
            epoch=answer["epoch"],
            compat_hash=compat_hash(COMPATIBILITY),
            lease_seconds=LEASE_SECONDS,
        )

    async def pull(self, remote: list[int], local: list[int]) -> float:
        source = await self.grant(remote)
        started = time.perf_counter()
        result = await self.side.service.pull(source, remote, local)
        seconds = time.perf_counter() - started
        if not result.ok:
            raise RuntimeError(result.reason)
        return seconds

    def one_sided(self) -> bool:
        return self.side.transport._reads._one_sided

    def nixl(self, engine_id: str, remote: list[int], local: list[int]) -> float:
        """The least NIXL needs: one request from prepared lists, polled without pause."""
        transport = self.side.transport
        agent = transport._agent._agent
        blocks = transport._peers[engine_id].blocks
        with transport._agent.lock:  # UCX is used by one thread at a time, the progress thread too
            started = time.perf_counter()
            handle = agent.make_prepped_xfer(
                "READ", transport._reads.arena, np.array(local, np.int32), blocks, np.array(remote, np.int32)
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds = time.perf_counter() - started
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(state)
        return seconds

    def memcpy(self, remote: list[int], local: list[int]) -> float:
        started = time.perf_counter()
        for theirs, mine in zip(remote, local, strict=True):
            self.side.blocks[mine] = self.source_copy[theirs]
        return time.perf_counter() - started

    def pick(self, count: int) -> list[int]:
        return [int(block) for block in self.random.permutation(NUM_BLOCKS)[:count]]

    async def run(self, rounds: int) -> dict[str, Any]:
        cold = await self.pull([0], [0])
        engine_id = next(iter(self.side.service.warm_pairs))
        # A new peer is read through staging at first (DIRECT_AFTER_SECONDS): the steady state is what is measured.
        while not self.side.transport._reads.direct(self.side.transport._peers[engine_id]) and self.one_sided():
            await self.pull([0], [0])
        times: dict[tuple[str, int], list[float]] = {}
        for turn in range(rounds + 2):
            for tokens in TOKENS:
                remote, local = self.pick(tokens // BLOCK_SIZE), self.pick(tokens // BLOCK_SIZE)
                for name in ("nixl", "pull", "memcpy", "pull", "nixl"):  # A B C B A
                    self.side.blocks[local] = 0
                    if name == "pull":
                        seconds = await self.pull(remote, local)
                    elif name == "nixl":
                        seconds = self.nixl(engine_id, remote, local)
                    else:
                        seconds = self.memcpy(remote, local)
                    if not bool((self.side.blocks[local, ::4096] == 1).all()):
                        raise RuntimeError(f"{name} did not bring the data")
                    if turn >= 2:
                        times.setdefault((name, tokens), []).append(seconds)
        return self.report(cold, times, rounds)

    def report(self, cold: float, times: dict[tuple[str, int], list[float]], rounds: int) -> dict[str, Any]:
        sizes = {}
        for tokens in TOKENS:
            volume = tokens // BLOCK_SIZE * BLOCK_BYTES
            pull, nixl, memcpy = (_summary(times[name, tokens]) for name in ("pull", "nixl", "memcpy"))
            sizes[str(tokens)] = {
                "bytes": volume,
                "pull_ms_p50": round(pull["p50"] * 1e3, 3),
                "nixl_ms_p50": round(nixl["p50"] * 1e3, 3),
                "memcpy_ms_p50": round(memcpy["p50"] * 1e3, 3),
                "pull_gigabytes_per_second": round(volume / pull["p50"] / 1e9, 2),
                "beyond_nixl_ms_p50": round((pull["p50"] - nixl["p50"]) * 1e3, 3),
                "over_nixl": round(_ratio(times["nixl", tokens], times["pull", tokens], rounds), 3),
                "over_memcpy": round(_ratio(times["memcpy", tokens], times["pull", tokens], rounds), 3),
                "spread": {
                    "pull": round(pull["spread"], 2),
                    "nixl": round(nixl["spread"], 2),
                    "memcpy": round(memcpy["spread"], 2),
                },
            }
        largest = sizes[str(TOKENS[-1])]
        return {
            "bench": "transfer",
            "transport": self.side.transport.in_use(),
            "over_nixl": largest["over_nixl"],
            "over_memcpy": largest["over_memcpy"],
            "handoff_ms_p50": sizes["512"]["beyond_nixl_ms_p50"],
            "first_pull_ms": round(cold * 1e3, 1),
            "sizes": sizes,
        }


def _summary(values: list[float]) -> dict[str, float]:
    p10, p50, p90 = np.percentile(values, [10, 50, 90])
    return {"p50": float(p50), "spread": float((p90 - p10) / p50)}


def _ratio(over: list[float], under: list[float], rounds: int) -> float:
    """Median over rounds of one's mean time over the other's: drift of the machine between rounds cancels out."""
    means = [np.reshape(values, (rounds, -1)).mean(axis=1) for values in (over, under)]
    return float(np.median(means[0] / means[1]))


def _cpu_share(pid: int, seconds: float) -> float:
    process = psutil.Process(pid)
    before, started = process.cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return used / (time.perf_counter() - started)


async def reader(kind: str, rounds: int) -> dict[str, Any]:
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.transfer", "--owner", "--transport", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        port = int(await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), 60))
        side = Side(kind, 0)
        await side.service.start()
        async with aiohttp.ClientSession() as session:
            bench = Bench(side, port, session)
            result = await bench.run(rounds)
            await asyncio.sleep(3)  # past the time an owner expects its peers in
            result["idle_cpu_percent"] = round(100 * await asyncio.to_thread(_cpu_share, child.pid, 5.0), 2)
            await bench.grant([0])
            result["leased_cpu_percent"] = round(100 * await asyncio.to_thread(_cpu_share, child.pid, 3.0), 2)
        await side.service.stop()
        return result
    finally:
        child.kill()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shared-memory", "rdma"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.owner:
        uvloop.run(owner(args.transport))
    print(json.dumps(uvloop.run(reader(args.transport, args.rounds))), flush=True)
    exit_now(0)


if __name__ == "__main__":
    main()
