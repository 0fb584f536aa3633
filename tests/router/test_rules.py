"""Failure rules R1-R5 and R7: whatever the workers do, the client's answer is whole and the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from router.asking import ONE_PAIR, ask, chat, check, completion, plant
from router.conftest import StartBench
from router.fake_worker import Answer as Truth
from router.fake_worker import Fault
from support.cluster import until

THREE: dict[str, str | None] = {"p0": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"}


REQUESTS = [completion(), completion(False), chat(), chat(False)]
IDS = ["text-stream", "text-whole", "chat-stream", "chat-whole"]


@pytest.mark.parametrize("request_body", REQUESTS, ids=IDS)
async def test_two_legs(start_bench: StartBench, request_body: dict[str, Any]) -> None:
    bench = await start_bench()
    answer = await ask(bench, request_body, headers={"x-request-id": "mine-1"})
    check(answer, request_body)
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-forebay-prefill"].startswith("p")
    assert answer.headers["x-forebay-decode"].startswith("d")
    assert "x-secret-header" not in answer.headers
    assert "x-forebay-load" not in answer.headers
    decode = bench[answer.headers["x-forebay-decode"]]
    assert [call.leg for call in decode.calls] == ["decode"]
    assert decode.calls[0].body["kv_transfer_params"]["signature"] == "kept byte for byte"
    assert not answer.comments
    assert "kv_transfer_params" not in (answer.body or {})


@pytest.mark.parametrize("request_body", [completion(), chat()], ids=["text", "chat"])
async def test_a_held_back_first_token_comes_with_the_decode_stream(
    start_bench: StartBench, request_body: dict[str, Any]
) -> None:
    bench = await start_bench(ONE_PAIR)
    bench["p0"].hold_first = True
    check(await ask(bench, request_body), request_body)


async def test_first_delta_is_out_before_the_decode_leg_answers(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    gate = bench["d0"].gates["decode"] = asyncio.Event()
    async with bench.session.post(bench.url + "/v1/completions", json=completion()) as response:
        async with asyncio.timeout(5):
            line = await response.content.readline()
        assert line.startswith(b"data: {")
        gate.set()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("request_body", [completion(tokens=1), completion(False, 1), chat(tokens=1)])
async def test_an_answer_of_one_token_needs_no_decode_leg(
    start_bench: StartBench, request_body: dict[str, Any]
) -> None:
    bench = await start_bench(ONE_PAIR)
    check(await ask(bench, request_body), request_body)
    assert not bench["d0"].calls

    async def released() -> bool:
        return not bench["d0"].reserved and bool(bench["d0"].released)

    await until(released, "the slot is given back", 5)


@pytest.mark.parametrize("request_body", [completion(tokens=1), completion(False, 1)])
async def test_a_slot_that_is_kept_late_is_given_back_after_that(
    start_bench: StartBench, request_body: dict[str, Any]
) -> None:
    """The request is over while a slot is being asked for: a release that overtook the question would leave it kept."""
    bench = await start_bench(ONE_PAIR, reserve_timeout=30.0)
    gate = bench["d0"].gates["reserve"] = asyncio.Event()
    check(await ask(bench, request_body), request_body)

    async def released() -> bool:
        return bool(bench["d0"].released)

    with contextlib.suppress(AssertionError):  # a release that did not wait would be here by then
        await until(released, "a release", 0.3)
    gate.set()

    async def kept_and_released() -> bool:
        return bool(bench["d0"].kept) and not bench["d0"].reserved

    await until(kept_and_released, "the slot is given back", 5)


R1 = [Fault("reset"), Fault("status", status=500), Fault("status", status=503), Fault("status", status=429)]


@pytest.mark.parametrize("fault", R1, ids=lambda f: f"{f.kind}-{f.status}")
@pytest.mark.parametrize("request_body", REQUESTS, ids=IDS)
async def test_r1_prefill_fails(start_bench: StartBench, request_body: dict[str, Any], fault: Fault) -> None:
    bench = await start_bench()
    plant(bench, "p", "prefill", fault)
    check(await ask(bench, request_body), request_body)
    assert len(bench["p0"].calls) == len(bench["p1"].calls) == 1
    assert 'forebay_router_retries_total{leg="prefill"' in await bench.metrics()


async def test_r1_prefill_stops(start_bench: StartBench) -> None:
    """A stopped process never errs: its load stream falls silent, and its leg is given up for that."""
    bench = await start_bench({"p0": "prefill", "p1": "prefill", "d0": "decode"})
    gates = [bench[name].gates.setdefault("prefill", asyncio.Event()) for name in ("p0", "p1")]
    task = asyncio.create_task(ask(bench, completion()))

    async def arrived() -> bool:
        return bool(bench["p0"].calls or bench["p1"].calls)

    await until(arrived, "the prompt reached a prefill worker", 5)
    stopped = bench["p0"] if bench["p0"].calls else bench["p1"]
    stopped.silent = True
    gates[1 if stopped.name == "p0" else 0].set()
    check(await task, completion())
    # The slot follows the new prefill worker, not the old one.
    (decode_leg,) = bench["d0"].legs("decode")
    assert decode_leg.done
    assert len(bench["d0"].released) == 1


@pytest.mark.parametrize("request_body", REQUESTS, ids=IDS)
@pytest.mark.parametrize("fault", [Fault("reset"), Fault("status", status=500), Fault("status", status=503)])
async def test_r3_decode_fails_before_its_first_token(
    start_bench: StartBench, request_body: dict[str, Any], fault: Fault
) -> None:
    bench = await start_bench()
    plant(bench, "d", "decode", fault)
    answer = await ask(bench, request_body)
    check(answer, request_body)
    assert len(bench["d0"].legs("decode")) == len(bench["d1"].legs("decode")) == 1
    if request_body["stream"]:
        other = "d1" if answer.headers["x-forebay-decode"] == "d0" else "d0"
        assert answer.comments == [f": forebay decode={other}"]


MID_STREAM = ["reset", "stall", "no_done", "error_event", "garbage"]


@pytest.mark.parametrize("kind", MID_STREAM)
@pytest.mark.parametrize("after", [1, 2, 3, 7])
async def test_r4_decode_fails_mid_stream(start_bench: StartBench, kind: str, after: int) -> None:
    bench = await start_bench()
    plant(bench, "d", "decode", Fault(kind, after=after))
    request_body = completion()
    answer = await ask(bench, request_body)
    check(answer, request_body)
    went_on = [w for w in bench.workers.values() if w.legs("continue")]
    assert [w.role for w in went_on] == ["decode"]
    assert answer.comments == [f": forebay decode={went_on[0].name}"]


@pytest.mark.parametrize("hold_first", [False, True])
@pytest.mark.parametrize("request_body", [completion(), chat()], ids=["text", "chat"])
async def test_r4_several_deaths_in_a_row(
    start_bench: StartBench, request_body: dict[str, Any], hold_first: bool
) -> None:
    bench = await start_bench(THREE)
    bench["p0"].hold_first = hold_first
    plant(bench, "d", "decode", Fault("reset", after=2))
    for name in ("d0", "d1", "d2"):
        bench[name].faults["continue"].append(Fault("reset", after=2))
    check(await ask(bench, request_body), request_body)
    assert len(bench["p0"].legs("continue")) == 1  # the last one left: R5
    assert 'degraded_total{kind="no_decode"} 1.0' in await bench.metrics()


async def test_r4_no_worker_is_left(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, both_phases=False)
    bench["d0"].faults["decode"].append(Fault("reset", after=2))
    answer = await ask(bench, completion())
    assert answer.status == 200
    assert "no worker is left" in answer.error["message"]
    assert not answer.done
    assert completion_text(3) == answer.text

    async def cancelled() -> bool:
        return not bench["p0"].leases

    await until(cancelled, "the lease is cancelled", 5)


def completion_text(events: int) -> str:
    """Text of the first events of the standard answer, none of them held back."""
    truth = Truth(completion(), False, "")
    return "".join(truth.shown(i) or "" for i in range(events))


async def test_r4_the_worker_restarts_and_goes_on(start_bench: StartBench) -> None:
    """A restarted process is another worker: it may take its own stream up again."""
    bench = await start_bench(ONE_PAIR, both_phases=False)
    bench["d0"].gap = 0.02
    request_body = completion(tokens=40)
    task = asyncio.create_task(ask(bench, request_body))

    async def streams() -> bool:
        return bool(bench["d0"].legs("decode"))

    await until(streams, "the decode leg runs", 5)
    await bench["d0"].die()
    await bench["d0"].start()
    check(await task, request_body)


async def test_r4_decode_stops(start_bench: StartBench) -> None:
    """Silence of the load stream shortens the stall timeout."""
    bench = await start_bench(stall_timeout=60.0)
    plant(bench, "d", "decode", Fault("stall", after=3))
    task = asyncio.create_task(ask(bench, completion()))

    async def streams() -> bool:
        return bool(bench["d0"].legs("decode") or bench["d1"].legs("decode"))

    await until(streams, "the decode leg runs", 5)
    (bench["d0"] if bench["d0"].legs("decode") else bench["d1"]).silent = True
    check(await asyncio.wait_for(task, 10), completion())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_leg_on_a_worker_whose_engine_hangs_goes_elsewhere(
    start_bench: StartBench, leg: str, stream: bool
) -> None:
    """Its server goes on to speak, and says that it is not ready."""
    bench = await start_bench(stall_timeout=60.0)
    plant(bench, leg[0], leg, Fault("stall"))
    task = asyncio.create_task(ask(bench, completion(stream)))

    async def runs() -> bool:
        return any(worker.legs(leg) for worker in bench.workers.values())

    await until(runs, f"the {leg} leg runs", 5)
    next(worker for worker in bench.workers.values() if worker.legs(leg)).ready = False
    check(await asyncio.wait_for(task, 10), completion(stream))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_r5_a_pool_is_gone(start_bench: StartBench, lost: str, stream: bool) -> None:
    bench = await start_bench(ONE_PAIR)
    await bench[lost].die()
    answer = await ask(bench, completion(stream))
    check(answer, completion(stream))
    left = "d0" if lost == "p0" else "p0"
    assert answer.headers["x-forebay-decode"] == answer.headers["x-forebay-prefill"] == left
    kind = "no_prefill" if lost == "p0" else "no_decode"
    assert f'forebay_router_degraded_total{{kind="{kind}"}} 1.0' in await bench.metrics()


@pytest.mark.parametrize("lost", ["p0", "d0"])
async def test_r5_refuse(start_bench: StartBench, lost: str) -> None:
    bench = await start_bench(ONE_PAIR, both_phases=False)
    await bench[lost].die()
    await bench.state(lost, "dead")
    answer = await ask(bench, completion())
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.error["type"] == "server_error"
    async with bench.session.get(bench.url + "/ready") as response:
        assert response.status == 503
        assert lost + " dead" in (await response.json())["reason"]


async def test_r5_a_degraded_stream_goes_on_elsewhere(start_bench: StartBench) -> None:
    """Without a prefill leg the prompt's token count is not known: the rest comes from a second run."""
    bench = await start_bench({"d0": "decode", "d1": "decode"})
    plant(bench, "d", "plain", Fault("reset", after=5))
    for request_body in (completion(), chat()):
        check(await ask(bench, request_body), request_body)


@pytest.mark.parametrize(("held", "leg"), [("p0", "prefill"), ("d0", "decode")])
@pytest.mark.parametrize("stream", [True, False])
async def test_r7_client_leaves(start_bench: StartBench, held: str, leg: str, stream: bool) -> None:
    bench = await start_bench(ONE_PAIR)
    bench[held].gates[leg] = asyncio.Event()
    task = asyncio.create_task(ask(bench, completion(stream)))

    async def arrived() -> bool:
        return bool(bench[held].legs(leg)) and (leg == "decode" or bool(bench["d0"].reserved))

    await until(arrived, f"the {leg} leg waits", 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    async def freed() -> bool:
        return bench[held].calls[-1].aborted and bool(bench["p0"].cancelled) and not bench["d0"].reserved

    took = await until(freed, "leg aborted, lease cancelled, slot given back", 5)
    assert took < 1.0
    assert 'requests_total{code="499"' in await bench.metrics()


async def test_a_client_that_hangs_up_on_done_has_its_answer(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    rounds = 20
    body = json.dumps(completion(True)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(rounds):
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
        writer.write(head + body)
        await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 5)
        writer.transport.abort()

    async def counted() -> bool:
        metrics = await bench.metrics()
        assert 'requests_total{code="499"' not in metrics
        return any(
            line.startswith("forebay_router_requests_total{") and line.endswith(f" {rounds}.0")
            for line in metrics.splitlines()
        )

    await until(counted, "every answer counts as whole", 5)
