"""Requests that come while the workers start: two workers serve them if the second is seconds away, else one."""

from __future__ import annotations

import asyncio

from router.conftest import Bench, StartBench
from router.fake_worker import FakeWorker
from support.client import complete
from support.cluster import until

REQUEST = {"model": "fake", "prompt": "a prompt", "max_tokens": 12, "seed": 5, "stream": True}


async def with_starting(start_bench: StartBench, grace: float) -> Bench:
    """d0 is ready, p0 speaks but is not ready yet."""
    bench = await start_bench({"d0": "decode"}, start_grace=grace)
    bench.workers["p0"] = FakeWorker("p0", "prefill")
    bench["p0"].ready = False
    await bench["p0"].start()
    bench.show()
    await bench.settled()
    return bench


async def test_the_first_request_waits_for_a_worker_that_starts(start_bench: StartBench) -> None:
    bench = await with_starting(start_bench, grace=30)
    asked = asyncio.create_task(complete(bench.session, bench.url, REQUEST))

    async def arrived() -> bool:
        return bench.router.metrics.in_flight == 1

    await until(arrived, "the request at the router", 5)
    assert bench["d0"].calls == []
    bench["p0"].ready = True
    answer = await asked
    assert (answer.headers["x-forebay-prefill"], answer.headers["x-forebay-decode"]) == ("p0", "d0")


async def test_no_longer_than_the_grace(start_bench: StartBench) -> None:
    bench = await with_starting(start_bench, grace=0.2)
    answer = await complete(bench.session, bench.url, REQUEST)
    assert (answer.status, answer.done) == (200, True)
    assert answer.headers["x-forebay-decode"] == "d0"
    assert bench["p0"].calls == []


async def test_a_role_that_was_met_before_is_not_waited_for(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode"}, start_grace=600)
    bench["p0"].ready = False
    await bench.state("p0", "loading")
    answer = await complete(bench.session, bench.url, REQUEST)
    assert answer.headers["x-forebay-decode"] == "d0"


async def test_while_all_are_loading_the_client_is_told_to_wait(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode"}, start_grace=0.1)
    for name in ("p0", "d0"):
        bench[name].ready = False
        await bench.state(name, "loading")
    answer = await complete(bench.session, bench.url, REQUEST)
    assert answer.status == 503
    assert answer.error["message"].endswith("; the model is being loaded: wait and try again")
