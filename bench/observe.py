"""What it costs to look at 64 workers: one look a second at the router, all workers' pages each 15 s, and the law.

    python -m bench.observe [--seconds 30] [--workers 64]

Share of a core that the observer spends, for our engine's pages and for pages as long as vLLM's. The pages and
the router's answer come from another process and change with each look.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
from aiohttp import web

from bench.checkpoint import after_an_hour
from bench.report import finish
from forebay_engine.core.handle import CoreStats
from forebay_engine.server.metrics import ServerMetrics
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.decide import Split
from forebay_operator.observe.endpoints import EndpointsSource
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.pilot import Pilot
from forebay_router.metrics import RouterMetrics

VLLM_LINES = 1200
VLLM = """vllm:num_requests_running{engine="0",model_name="m"} 8.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} %(tokens)d
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} %(seconds)f
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} %(seconds)f
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} %(steps)d
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
"""


def _page(kind: str, n: int) -> bytes:
    if kind == "vllm":
        filler = "".join(
            f'vllm:request_latency_seconds_bucket{{engine="0",le="{i}",model_name="m"}} {n + i}\n'
            for i in range(VLLM_LINES)
        )
        return (filler + VLLM % {"tokens": 5000 * n, "seconds": float(n), "steps": 400 * n}).encode()
    stats = CoreStats(prompt_step_tokens=5000 * n, prompt_step_seconds=n, decode_steps=50 * n, decode_busy_seconds=n,
                      decode_step_sequences=400 * n, decode_step_resident=400_000 * n, total_blocks=10_000)  # fmt: skip
    return ServerMetrics(lambda: stats).render()


def _serve(pipe: Connection, kind: str, count: int) -> None:
    counted = RouterMetrics(1.0, 0.04)
    state = {"n": 1, "page": _page(kind, 1)}

    async def load(_: web.Request) -> web.Response:
        for _i in range(40):
            counted.offer(500)
            counted.finished(time.monotonic(), "/v1/completions", 200, 0.4, 0.02)
        report = {"engine_id": "e", "epoch": state["n"], "running": 8, "decoding": 8, "resident_decode_tokens": 8000,
                  "free_blocks": 9000, "total_blocks": 10_000, "max_running": 256, "ready": True}  # fmt: skip
        workers = [
            {
                "name": f"w{i}",
                "role": "prefill" if i % 2 else "decode",
                "state": "ready",
                "age_seconds": 0.1,
                "load": report,
            }
            for i in range(count)
        ]
        return web.Response(text=json.dumps({"name": "r", **counted.as_json(time.monotonic()), "workers": workers}))

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=state["page"])

    async def turn() -> None:
        while True:
            await asyncio.sleep(5)
            state["n"] += 1
            state["page"] = _page(kind, state["n"])

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/load", load)
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await turn()

    asyncio.run(run())


async def observe(address: str, count: int, seconds: float) -> dict[str, Any]:
    members = tuple(Member(f"w{i}", "prefill" if i % 2 else "decode", address) for i in range(count))
    fleet = Fleet(members, (address,))
    spec = DisaggregatedModelSpec.model_validate(
        {
            "model": {"servedName": "m"},
            "engine": {"type": "Simulated"},
            "prefill": {"replicas": count // 2},
            "decode": {"replicas": count - count // 2},
        }
    )
    async with aiohttp.ClientSession() as session:
        source = EndpointsSource(session, time.time)
        split = Split(count // 2, count - count // 2)
        now = time.time()
        # Without full windows the law decides nothing, and costs nothing.
        known = after_an_hour("h100-llama-8b", split, now, requests=40, prompt_tokens=20_000, output=200.0)
        pilot = Pilot(known, now=now)
        reasons: Counter[str] = Counter()
        looking = deciding = 0.0
        # The first minute reads the pages more often; the steady state is what counts.
        source._begun_at -= 60
        started = time.monotonic()
        looks = 0
        while time.monotonic() < started + seconds:
            began = time.process_time()
            seen = await source.observe(fleet)
            looked = time.process_time()
            ruling = pilot.rule(seen, spec, split, source.workers(), time.time())
            looking, deciding, looks = looking + looked - began, deciding + time.process_time() - looked, looks + 1
            reasons[ruling.decision.reason] += 1
            before = time.process_time()
            await asyncio.sleep(max(0.0, started + looks - time.monotonic()))
            looking += time.process_time() - before
        await source.close()
    elapsed = time.monotonic() - started
    return {
        "observe_core_percent": round(100 * looking / elapsed, 2),
        "decide_core_percent": round(100 * deciding / elapsed, 2),
        "decide_ms": round(1e3 * deciding / looks, 2),
        "reasons": dict(reasons),
    }


def measure(kind: str, count: int, seconds: float) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, kind, count), daemon=True)
    server.start()
    try:
        if not ours.poll(30):
            raise RuntimeError("the server of the pages did not start within 30 s")
        return asyncio.run(observe(f"127.0.0.1:{ours.recv()}", count, seconds))
    finally:
        server.terminate()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=64)
    options = parser.parse_args()
    found = {kind: measure(kind, options.workers, options.seconds) for kind in ("native", "vllm")}
    finish({"bench": "observe", "workers": options.workers, **found})


if __name__ == "__main__":
    main()
