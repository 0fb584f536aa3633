"""The gear in the request's course: both phases on a decode worker, early refusals, and what follows when they fail."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_wire import headers
from router.asking import ONE_PAIR, ask, chat, check, completion
from router.conftest import Bench, StartBench
from router.fake_worker import Fault
from support.cluster import until

LONG = {"queued_prefill_tokens": 9500}
"""At the fake workers' 10,000 tokens a second: 0.95 s before a prompt's turn."""


async def heard(bench: Bench, name: str) -> None:
    """The router has the report that the test made."""
    wanted = bench[name].report

    async def told() -> bool:
        report = bench.router.workers[name].report
        return report is not None and all(getattr(report, key) == value for key, value in wanted.items())

    await until(told, f"the router knows {name}'s load", 5)


@pytest.mark.parametrize("body", [completion(), completion(False), chat(), chat(False)])
async def test_overflow_runs_both_phases_on_a_decode_worker(start_bench: StartBench, body: dict[str, Any]) -> None:
    bench = await start_bench(ONE_PAIR, convertible="overflow")
    bench["p0"].report = LONG
    await heard(bench, "p0")
    check(await ask(bench, body), body)
    assert [call.leg for call in bench["d0"].calls] == ["plain"]
    assert float(bench["d0"].calls[0].headers[headers.STEP_SECONDS]) == pytest.approx(0.036)
    assert not bench["p0"].calls
    assert (await bench.load())["totals"]["converted"] == {"overflow": 1}
    assert 'forebay_router_converted_total{kind="overflow"} 1' in await bench.metrics()


async def test_a_short_prompt_moves_no_kv(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, convertible="always")
    check(await ask(bench, completion()), completion())
    assert (await bench.load())["totals"]["converted"] == {"short": 1}
    long = {**completion(), "prompt": "many words " * 500}
    check(await ask(bench, long), long)
    assert [call.leg for call in bench["p0"].calls] == ["prefill"]


async def test_off_or_split_elsewhere_nothing_is_converted(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    bench["p0"].report = LONG
    await heard(bench, "p0")
    check(await ask(bench, completion()), completion())
    assert [call.leg for call in bench["p0"].calls] == ["prefill"]
    assert headers.STEP_SECONDS not in bench["p0"].calls[0].headers
    assert headers.WAIT_SECONDS not in bench["p0"].calls[0].headers


FAULTS = [Fault("reset"), Fault("status", status=429), Fault("status", status=500)]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.status}")
@pytest.mark.parametrize("body", [completion(), completion(False)], ids=["stream", "whole"])
async def test_a_convertible_decoder_that_fails_leaves_the_usual_way(
    start_bench: StartBench, fault: Fault, body: dict[str, Any]
) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode", "d1": "decode"}, convertible="overflow")
    bench["p0"].report = LONG
    await heard(bench, "p0")
    for name in ("d0", "d1"):
        bench[name].faults["plain"].append(fault)
    check(await ask(bench, body), body)
    assert [call.leg for call in bench["p0"].calls] == ["prefill"]


@pytest.mark.parametrize("after", [1, 5])
async def test_a_convertible_decoder_that_dies_in_mid_stream_is_gone_on_from(
    start_bench: StartBench, after: int
) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode", "d1": "decode"}, convertible="overflow")
    bench["p0"].report = LONG
    await heard(bench, "p0")
    for name in ("d0", "d1"):
        bench[name].faults["plain"].append(Fault("reset", after=after))
    check(await ask(bench, completion()), completion())
    legs = sorted(call.leg for name in ("d0", "d1") for call in bench[name].calls)
    assert legs == ["continue", "plain"]


async def test_a_late_request_is_refused_before_any_prefill(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, refusal_factor=1.0)
    bench["p0"].report = {"queued_prefill_tokens": 25_000}
    await heard(bench, "p0")
    for body in (completion(), completion(False)):
        answer = await ask(bench, body)
        assert answer.status == 429
        assert answer.error["code"] == "overloaded"
        assert answer.headers["retry-after"] == "2"
    assert not any(worker.calls for worker in bench.workers.values())
    totals = (await bench.load())["totals"]
    assert totals["refused"] == {"router": 2}
    assert totals["missed_ttft"] == 2, "what is refused has missed its objective"
    assert totals["missed_in"]["prefill"] == 2
    # The queue is gone: served again.
    bench["p0"].report = {"queued_prefill_tokens": 0}
    await heard(bench, "p0")
    check(await ask(bench, completion()), completion())


async def test_a_high_bound_on_the_answer_is_no_reason_to_refuse(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, refusal_factor=1.0)
    check(await ask(bench, completion()), completion())  # the router has seen how long answers are
    # An answer of 12 tokens would free its place in 2.4 s; room for the prompt there is now.
    bench["d0"].report = {"running": 1, "decoding": 1, "decode_step_seconds": 0.2, "free_blocks": 10}
    await heard(bench, "d0")
    body = completion(tokens=200)
    check(await ask(bench, body), body)
    bench["d0"].report = {**bench["d0"].report, "free_blocks": 0}
    await heard(bench, "d0")
    assert (await ask(bench, body)).status == 429


async def test_the_worker_has_the_last_word(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "p1": "prefill", "d0": "decode"}, refusal_factor=1.0)
    for name in ("p0", "p1"):
        bench[name].faults["prefill"].append(Fault("status", status=429, retry_after="3"))
    answer = await ask(bench, completion())
    assert (answer.status, answer.headers["retry-after"]) == (429, "3")
    asked = [call for name in ("p0", "p1") for call in bench[name].calls]
    assert len(asked) == 2, "the other is asked before the request is refused"
    assert all(0 < float(call.headers[headers.WAIT_SECONDS]) <= 1.0 for call in asked)
    assert (await bench.load())["totals"]["refused"] == {"worker": 1}


async def test_a_retry_after_a_death_is_not_refused(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "p1": "prefill", "d0": "decode"}, refusal_factor=1.0)
    bench["p1"].report = {"queued_prefill_tokens": 9900}
    await heard(bench, "p1")
    bench["p0"].faults["prefill"].append(Fault("reset"))
    check(await ask(bench, completion()), completion())
    assert headers.WAIT_SECONDS in bench["p0"].calls[0].headers
    assert headers.WAIT_SECONDS not in bench["p1"].calls[0].headers
