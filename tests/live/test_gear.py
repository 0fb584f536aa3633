"""The router's gear before real schedulers: overload is refused early, decode workers help and no stream suffers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.report import percentile

from support.client import Answer, complete
from support.cluster import Cluster

SLOW = ["--perf-model", "slow", "--max-batched-tokens", "1024"]
"""5,000 prompt tokens a second, decode steps of 20 ms and more."""


def prompt(rng: random.Random, size: int) -> str:
    return "".join(rng.choice("abcdefgh ") for _ in range(size))


def body(cluster: Cluster, text: str, tokens: int) -> dict[str, Any]:
    return {"model": cluster.model, "prompt": text, "max_tokens": tokens, "ignore_eos": True, "stream": True}


async def offered(count: int, per_second: float, ask: Callable[[int], Awaitable[Answer]]) -> list[Answer]:
    """`count` requests at an even rate, whatever becomes of them."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = []
    for i in range(count):
        await asyncio.sleep(max(0.0, began + i / per_second - loop.time()))
        tasks.append(asyncio.ensure_future(ask(i)))
    return list(await asyncio.gather(*tasks))


async def test_overload_is_refused_early_and_the_accepted_keep_their_objective(tmp_path: Path) -> None:
    """Twice what one prefill worker carries, for some seconds: 1,000-token prompts take it 0.2 s each."""
    flags = ["--ttft-ms", "1000", "--tpot-ms", "200", "--refusal-factor", "1.0"]
    async with Cluster(tmp_path, prefill=1, decode=2, worker_args=SLOW, router_args=flags) as cluster:
        rng = random.Random(3)

        async def ask(_: int) -> Answer:
            return await complete(cluster.session, cluster.router.url, body(cluster, prompt(rng, 1000), 8))

        assert (await ask(0)).done, "from here on the velocity is known"
        answers = await offered(60, 10.0, ask)
        accepted = [answer for answer in answers if answer.status == 200]
        refused = [answer for answer in answers if answer.status == 429]
        assert len(accepted) + len(refused) == len(answers)
        # 6 s at 5 prompts a second, and about 5 more in the queue at the end.
        assert 24 <= len(accepted) <= 42, f"{len(accepted)} of {len(answers)} accepted"
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        # The objective is 1 s; who is not refused in time would be served after up to 6 s.
        assert percentile([answer.ttft for answer in accepted], 0.95) <= 2.5
        totals = (await cluster.router_load())["totals"]
        assert sum(totals["refused"].values()) == len(refused)
        await cluster.assert_nothing_left()


async def test_decode_workers_help_a_full_prefill_pool_and_streams_keep_their_pace(tmp_path: Path) -> None:
    """A burst of prompts over one prefill worker, beside running streams. 80 ms a token is their objective."""
    flags = ["--ttft-ms", "1000", "--tpot-ms", "80", "--convertible", "overflow"]
    async with Cluster(tmp_path, prefill=1, decode=2, worker_args=SLOW, router_args=flags) as cluster:
        rng = random.Random(4)

        async def ask(size: int, tokens: int) -> Answer:
            return await complete(cluster.session, cluster.router.url, body(cluster, prompt(rng, size), tokens))

        streams = [asyncio.ensure_future(ask(50, 150)) for _ in range(4)]
        await ask(500, 2)
        burst = await asyncio.gather(*(ask(800, 4) for _ in range(14)))
        running = await asyncio.gather(*streams)
        assert all(answer.done for answer in (*burst, *running))
        totals = (await cluster.router_load())["totals"]
        assert totals["converted"].get("overflow", 0) >= 3
        # 14 x 0.16 s on one worker would be 2.2 s.
        assert max(answer.ttft for answer in burst) <= 2.0
        gaps = [gap for answer in running for gap in answer.gaps]
        assert percentile(gaps, 0.9) <= 0.08
        assert percentile(gaps, 0.99) <= 0.2
        await cluster.assert_nothing_left()
