"""Where the legs of a request go, and what its client is told when workers say no."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.asking import ONE_PAIR, ask, check, completion, plant
from router.conftest import StartBench
from router.fake_worker import Answer as Truth
from router.fake_worker import Fault
from support.cluster import until


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_run_on_one_worker(start_bench: StartBench, stream: bool) -> None:
    bench = await start_bench()
    request_body = completion(stream, n=2)
    plant(bench, "d", "plain", Fault("reset", after=7 if stream else 0))
    texts: dict[int, str] = {0: "", 1: ""}
    answer = await ask(bench, request_body)
    assert (answer.status, answer.error, answer.done) == (200, None, True)
    choices = [c for chunk in answer.chunks or [answer.body] for c in chunk["choices"]]
    for one in choices:
        texts[one["index"]] += one["text"]
    truth = Truth(request_body, False, "")
    assert texts == {0: truth.text(0), 1: truth.text(1)}
    assert not any(w.legs("prefill") or w.legs("decode") for w in bench.workers.values())


@pytest.mark.parametrize("more", [{"echo": True}, {"best_of": 2, "n": 2}, {"prompt_logprobs": 1}])
async def test_not_split(start_bench: StartBench, more: dict[str, Any]) -> None:
    bench = await start_bench()
    assert (await ask(bench, completion(**more))).status == 200
    assert sum(len(w.legs("plain")) for w in bench.workers.values()) == 1


async def test_no_slot_means_no_first_byte(start_bench: StartBench) -> None:
    """Refused by every decode worker, the leg queues at one; until that answers, an error may still be a status."""
    bench = await start_bench()
    for name in ("d0", "d1"):
        bench[name].admit = False
        bench[name].faults["decode"].append(Fault("status", status=429, retry_after="7"))
    answer = await ask(bench, completion())
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"

    async def cancelled() -> bool:
        return not (bench["p0"].leases or bench["p1"].leases)

    await until(cancelled, "the lease is cancelled", 5)
    check(await ask(bench, completion()), completion())


async def test_a_refused_slot_is_asked_for_elsewhere(start_bench: StartBench) -> None:
    bench = await start_bench()
    bench["d0"].admit = False
    for _ in range(3):
        answer = await ask(bench, completion())
        check(answer, completion())
        assert answer.headers["x-forebay-decode"] == "d1"


@pytest.mark.parametrize("status", [429, 503])
async def test_all_busy(start_bench: StartBench, status: int) -> None:
    bench = await start_bench(both_phases=False)
    for name in ("p0", "p1"):
        bench[name].faults["prefill"].append(Fault("status", status=status, retry_after="3"))
    answer = await ask(bench, completion())
    assert (answer.status, answer.headers["retry-after"]) == (status, "3")
    assert len(bench["p0"].calls) == len(bench["p1"].calls) == 1


async def test_a_400_goes_to_the_client_unchanged(start_bench: StartBench) -> None:
    bench = await start_bench()
    plant(bench, "p", "prefill", Fault("status", status=400), workers=2)
    answer = await ask(bench, completion())
    assert answer.status == 400
    assert answer.body == {"error": {"message": "planted", "type": "t", "param": None, "code": None}}
    assert len(bench["p0"].calls) + len(bench["p1"].calls) == 1


async def test_request_deadline(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, request_timeout=0.5)
    bench["p0"].gates["prefill"] = asyncio.Event()
    assert (await ask(bench, completion())).status == 504
    bench["p0"].gates.clear()
    bench["d0"].gates["decode"] = asyncio.Event()
    answer = await ask(bench, completion())
    assert (answer.status, answer.done) == (200, False)
    assert "not finished within 0.5 s" in answer.error["message"]


async def test_legs_pair_by_compatibility(start_bench: StartBench) -> None:
    bench = await start_bench()
    for name in ("p1", "d1"):
        bench[name].compat_hash = "other"

    async def known() -> bool:
        return all(w.report is not None and (w.report.compat_hash == "other") == (w.name[1] == "1")
                   for w in bench.router.workers)  # fmt: skip

    await until(known, "the hashes are known", 5)
    for _ in range(6):
        answer = await ask(bench, completion())
        check(answer, completion())
        assert answer.headers["x-forebay-prefill"][1] == answer.headers["x-forebay-decode"][1]
