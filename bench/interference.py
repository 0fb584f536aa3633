"""How much a burst of long prompts disturbs running streams: separate pools against one worker on the same cores.

4 streams run; after a quiet time 8 prompts of 1,024 tokens arrive. For each system: p99 of the gaps between the
streams' tokens in the burst over the p99 in quiet. `pd`: one prefill and one decode worker, one thread each.
`chunked`, `unchunked`: one worker with two threads. All systems stay up (idle ones cost nothing) and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from bench.report import finish, percentile, spread
from forebay_engine.model.prepare import default_cache_dir, prepare_smollm2
from support.client import complete
from support.cluster import Cluster

STREAMS = 4
PROMPTS = 8
PROMPT_TOKENS = 1024
QUIET_SECONDS = 6.0


def prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(tokens)]


async def one_round(session: aiohttp.ClientSession, url: str, seed: int) -> tuple[float, float, float]:
    """p99 gap in quiet and in the burst, and the burst's length; seconds."""
    rng = random.Random(seed)
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True, "stream": True}
    gaps: list[tuple[float, float]] = []
    stop = asyncio.Event()

    async def stream() -> None:
        request = {**body, "prompt": prompt(rng, 32), "max_tokens": 2000}
        async with session.post(url + "/v1/completions", json=request) as response:
            response.raise_for_status()
            last = None
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is not None:
                        gaps.append((now, now - last))
                    last = now
                if stop.is_set():
                    return

    streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
    while len(gaps) < STREAMS * 4:
        await asyncio.sleep(0.05)
        for task in streams:
            if task.done():
                task.result()
    quiet_from = time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    burst_from = time.monotonic()
    answers = await asyncio.gather(
        *(
            complete(session, url, {**body, "prompt": prompt(rng, PROMPT_TOKENS), "max_tokens": 4})
            for _ in range(PROMPTS)
        )
    )
    for answer in answers:
        if not answer.done:
            raise RuntimeError(f"a prompt of the burst failed with {answer.status}: {answer.error}")
    burst_to = time.monotonic()
    await asyncio.sleep(1.0)  # a gap is known only when it ends
    stop.set()
    await asyncio.wait_for(asyncio.gather(*streams), 30)
    quiet = [gap for at, gap in gaps if quiet_from <= at < burst_from]
    burst = [gap for at, gap in gaps if burst_from <= at - gap and at - gap < burst_to]
    return percentile(quiet, 0.99), percentile(burst, 0.99), burst_to - burst_from


async def run(rounds: int) -> dict[str, object]:
    model = prepare_smollm2(default_cache_dir(), lambda what, share: None)
    threads = {"pd": 1, "chunked": 2, "unchunked": 2}
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            systems: dict[str, Cluster] = {}
            for name, count in threads.items():
                extra = ["--no-chunked-prefill"] if name == "unchunked" else []
                pd = name == "pd"
                systems[name] = await stack.enter_async_context(
                    Cluster(
                        Path(folder) / name,
                        prefill=1,
                        decode=1 if pd else 0,
                        with_router=pd,
                        engine="native",
                        model_dir=model,
                        worker_args=["--dtype", "float32", "--threads", str(count), "--max-model-len", "4096", *extra],
                    )
                )
            urls = {n: s.router.url if n == "pd" else s.workers["p0"].url for n, s in systems.items()}
            ratios: dict[str, list[float]] = {name: [] for name in systems}
            bursts: dict[str, list[float]] = {name: [] for name in systems}
            for turn in range(rounds):
                for name, system in systems.items():
                    quiet, burst, seconds = await one_round(system.session, urls[name], turn * 10)
                    ratios[name].append(burst / quiet)
                    bursts[name].append(burst)
                    print(
                        f"round {turn} {name:10} p99 gap quiet {quiet * 1e3:6.0f} ms, burst {burst * 1e3:6.0f} ms, "
                        f"ratio {burst / quiet:5.2f}, burst took {seconds:4.1f} s",
                        flush=True,
                    )
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    return {
        "bench": "interference",
        "dtype": "float32",
        "rounds": rounds,
        **{name: round(value, 3) for name, value in medians.items()},
        "unchunked_over_pd": round(medians["unchunked"] / medians["pd"], 2),
        "chunked_over_pd": round(medians["chunked"] / medians["pd"], 2),
        "spread": {name: spread(values) for name, values in ratios.items()},
        "burst_gap_p99_ms": {name: round(statistics.median(v) * 1e3, 1) for name, v in bursts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    finish(asyncio.run(run(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
