"""Request ids are the client's: it may try again under the same one, here or at another router."""

from __future__ import annotations

import asyncio

import pytest

from forebay_wire import headers
from router.conftest import StartBench
from router.fake_worker import Fault
from router.test_rules import ONE_PAIR, ask, check, completion
from support.cluster import until


async def test_a_try_is_not_hit_by_the_end_of_the_one_before(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    prefill = bench["p0"]
    prefill.gates["prefill"] = asyncio.Event()
    prefill.gates["cancel"] = asyncio.Event()
    named = {headers.REQUEST_ID: "mine"}
    first = asyncio.create_task(ask(bench, completion(), headers=named))

    async def arrived() -> bool:
        return bool(prefill.legs("prefill"))

    await until(arrived, "the prefill leg waits", 5)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    async def left() -> bool:
        return prefill.legs("prefill")[0].aborted and bench.router.metrics.in_flight == 0

    await until(left, "the first try is over, but for its cancellation", 5)
    prefill.gates["prefill"].set()
    second = await ask(bench, completion(), headers=named)
    check(second, completion())
    assert second.headers[headers.REQUEST_ID] != "mine"
    prefill.gates["cancel"].set()

    async def told() -> bool:
        return prefill.cancelled == ["mine"] and not bench.router._ctx.cleaning("mine")

    await until(told, "the cancellation is through", 5)
    third = await ask(bench, completion(), headers=named)
    check(third, completion())
    assert third.headers[headers.REQUEST_ID] == "mine"


@pytest.mark.parametrize("workers", [None, ONE_PAIR], ids=["another worker", "no other"])
async def test_an_id_that_a_worker_still_has(start_bench: StartBench, workers: dict[str, str | None] | None) -> None:
    bench = await start_bench(workers)
    for name in ("p0", "p1"):
        if name in bench.workers:
            bench[name].faults["prefill"].append(Fault("status", status=409))
    check(await ask(bench, completion()), completion())
