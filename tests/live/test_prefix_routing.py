"""Conversations find the worker that has their beginning, also through a router that did not serve them before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bench.prefix import measure

from support.client import complete
from support.cluster import Cluster, free_port, until


async def test_four_workers_cache_as_well_as_one(tmp_path: Path) -> None:
    # In five turns what a conversation has of its own outweighs the beginning that each worker computes once.
    size = {"conversations": 12, "turns": 5}
    one = await measure(tmp_path / "one", workers=1, router=[], **size)
    four = await measure(tmp_path / "four", workers=4, router=[], **size)
    assert one.cached > 0.5
    assert four.cached >= 0.85 * one.cached, "by load alone it is 0.76"
    assert four.most_loaded <= 2.5, "a favourite would compute all, which is 4"


async def test_a_router_that_starts_later_knows_too(tmp_path: Path) -> None:
    flags = ["--perf-model", "instant"]
    async with Cluster(tmp_path, prefill=4, decode=1, worker_args=flags) as cluster:
        prompt = "a long beginning that is worth something " * 40

        async def ask(url: str, ending: str) -> str:
            body = {"model": cluster.model, "prompt": prompt + ending, "max_tokens": 4, "stream": True}
            answer = await complete(cluster.session, url, body)
            assert answer.done
            return answer.headers["x-forebay-prefill"]

        home = await ask(cluster.router.url, "0")
        port = free_port()
        command = ["router-two" if part == "router" else part for part in cluster.router.command]
        command[command.index("--port") + 1] = str(port)
        second = dataclasses.replace(
            cluster.router, name="router-two", port=port, command=command, log=tmp_path / "router-two.log", process=None
        )
        await second.start()
        try:
            await cluster.ready(second)

            async def all_heard() -> bool:
                async with cluster.session.get(second.url + "/load") as response:
                    workers = (await response.json())["workers"]
                return len(workers) == len(cluster.workers) and all(w["load"] for w in workers)

            await until(all_heard, "every worker's load stream has told", 10)
            assert [await ask(second.url, f"{i}") for i in range(4)] == [home] * 4
        finally:
            await second.end()
