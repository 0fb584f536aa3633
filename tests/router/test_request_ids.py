"""Request ids are the client's: it may try again under the same one, here or at another router."""

from __future__ import annotations

import asyncio

import pytest

from forebay_wire import headers
from router.asking import ONE_PAIR, ask, check, completion
from router.conftest import StartBench
from router.fake_worker import Fault
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
    assert second.headers[headers.REQUEST_ID] == "mine"
    first_id, second_id = (call.leg_id for call in prefill.legs("prefill"))
    assert first_id != second_id
    assert all(leg_id.startswith("mine.") for leg_id in (first_id, second_id))
    prefill.gates["cancel"].set()

    async def told() -> bool:
        return bool(prefill.cancelled)

    await until(told, "the cancellation is through", 5)
    assert prefill.cancelled == [first_id]


async def test_two_routers_and_one_id(start_bench: StartBench) -> None:
    """The same id through two routers at once, as a client's retry through a load balancer does."""
    one, two = await start_bench(ONE_PAIR), await start_bench({})
    two.workers = one.workers
    two.show()
    await two.settled()
    two.workers = {}  # the first bench ends them
    named = {headers.REQUEST_ID: "x" * 128}
    answers = await asyncio.gather(*(ask(bench, completion(), headers=named) for bench in (one, two, one, two)))
    for answer in answers:
        check(answer, completion())
        assert answer.headers[headers.REQUEST_ID] == "x" * 128
    ids = {call.leg_id for call in one["p0"].legs("prefill")}
    assert len(ids) == 4
    assert all(headers.is_request_id(leg_id) for leg_id in ids)


@pytest.mark.parametrize("workers", [None, ONE_PAIR], ids=["another worker", "no other"])
async def test_an_id_that_a_worker_still_has(start_bench: StartBench, workers: dict[str, str | None] | None) -> None:
    bench = await start_bench(workers)
    for name in ("p0", "p1"):
        if name in bench.workers:
            bench[name].faults["prefill"].append(Fault("status", status=409))
    check(await ask(bench, completion()), completion())
