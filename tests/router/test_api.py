"""The router's own judgement of a request, its probes and its figures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from forebay_router import trust
from router.asking import ONE_PAIR, ask, chat, check, completion
from router.conftest import StartBench
from router.fake_worker import PROMPT_TOKENS, TOKEN, Fault
from support.cluster import until


@pytest.mark.parametrize(
    ("body", "status", "param", "part"),
    [
        (b"", 400, None, "not a JSON object"),
        (b"{", 400, None, "not a JSON object"),
        (b"[1]", 400, None, "not a JSON object"),
        (b'"x"', 400, None, "not a JSON object"),
        (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None, "not a JSON object"),
        (b'{"model": "other", "prompt": "x"}', 404, "model", "'other' is not served here; there is fake"),
        (b'{"model": "fake", "kv_transfer_params": {"do_remote_decode": true}}', 400, "kv_transfer_params", ""),
        (b'{"model": "fake", "kv_transfer_params": null}', 400, "kv_transfer_params", ""),
        (b'{"model": "fake", "prompt": "' + b"x" * 1100 + b'"}', 413, None, "over 1000 bytes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
async def test_what_the_router_refuses(
    start_bench: StartBench, body: bytes, status: int, param: str | None, part: str
) -> None:
    limit = 1000 if status == 413 else 10**6
    bench = await start_bench(ONE_PAIR, max_body=limit)
    for chunked in (False, True):

        async def pieces() -> Any:
            for start in range(0, len(body), 300):
                yield body[start : start + 300]

        async with bench.session.post(bench.url + "/v1/completions", data=pieces() if chunked else body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (status, param)
            assert part in error["message"]
            assert response.headers["x-request-id"]
    assert not any(worker.calls for worker in bench.workers.values())


@pytest.mark.parametrize(
    "more",
    [{"temperature": "hot"}, {"seed": "x"}, {"max_tokens": "x"}, {"n": "x"}, {"stream": 1}, {"model": 3}],
    ids=lambda m: next(iter(m)),
)
async def test_malformed_fields_are_the_workers_to_refuse(start_bench: StartBench, more: dict[str, Any]) -> None:
    bench = await start_bench(ONE_PAIR)
    body = {**completion(), **more}
    async with bench.session.post(bench.url + "/v1/completions", json=body) as response:
        await response.read()
    (call,) = [worker.calls[0] for worker in bench.workers.values() if worker.calls][:1]
    sent = {**call.body, **call.body.get("kv_transfer_params", {}).get("client", {})}
    assert {name: sent[name] for name in more} == more


async def test_a_prefill_leg(start_bench: StartBench) -> None:
    """The client's limits travel beside the body, so that the worker judges them."""
    bench = await start_bench(ONE_PAIR)
    limits = {"max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": None}
    body = {**completion(**limits), "temperature": 0.25, "stop": ["ö"]}
    answer = await ask(bench, body)
    check(answer, body)
    assert answer.usage == {"prompt_tokens": 37, "completion_tokens": 12}
    (call,) = bench["p0"].calls
    client = call.body["kv_transfer_params"]["client"]
    assert client == limits
    assert call.body["max_tokens"] == 1
    assert not (limits.keys() - {"max_tokens"}) & call.body.keys()
    assert (call.body["temperature"], call.body["stop"], call.body["seed"]) == (0.25, ["ö"], 5)


async def test_a_seed_is_fixed_for_both_legs(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    for given in ({}, {"seed": None}):
        body = {name: value for name, value in completion(**given).items() if name != "seed" or given}
        await ask(bench, body)
    seeds = [(p.body["seed"], d.body["seed"]) for p, d in zip(bench["p0"].calls, bench["d0"].calls, strict=True)]
    assert all(p == d for p, d in seeds)
    assert len({p for p, _ in seeds}) == 2


async def test_headers(start_bench: StartBench) -> None:
    """Workers get the internal bearer and the trace, never the client's own secrets."""
    bench = await start_bench(ONE_PAIR)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = {"authorization": "Bearer of-the-client", "cookie": "a=b", "traceparent": trace, "content-type": "text/odd"}
    async with bench.session.post(
        bench.url + "/v1/completions", data=json.dumps(completion()), headers=sent
    ) as response:
        assert response.status == 200
        await response.read()
    for name in ("p0", "d0"):
        (call,) = bench[name].calls
        got = {key.lower(): value for key, value in call.headers.items()}
        assert got["authorization"] == f"Bearer {TOKEN}"
        assert got["traceparent"] == trace
        assert got["x-forebay-router"] == "router"
        assert got["x-request-id"] == response.headers["x-request-id"]
        assert got["x-forebay-leg"].startswith(got["x-request-id"] + ".")
        assert "cookie" not in got


@pytest.mark.parametrize("offered", ["", "a b", "x" * 129, "é", "a/../b", 'a"b'])
def test_bad_request_ids_are_replaced(offered: str) -> None:
    made = trust.request_id(offered)
    assert made != offered
    assert trust.request_id(made) == made


async def test_two_requests_at_once_never_share_an_id(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    gate = bench["p0"].gates["prefill"] = asyncio.Event()
    tasks = [asyncio.create_task(ask(bench, completion(), headers={"x-request-id": "same"})) for _ in range(2)]

    async def both() -> bool:
        return len(bench["p0"].calls) == 2

    await until(both, "both prefill legs run", 5)
    gate.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({call.leg_id for call in bench["p0"].calls}) == 2


async def test_api_keys(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, api_keys=(b"first", b"second"))
    for key, status in ((None, 401), ("wrong", 401), ("", 401), ("second", 200), ("first", 200)):
        sent = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = await ask(bench, completion(False), headers=sent)
        assert answer.status == status
        async with bench.session.get(bench.url + "/v1/models", headers=sent) as response:
            assert response.status == status
    async with bench.session.get(bench.url + "/v1/models", headers={"authorization": "Basic first"}) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"


async def test_one_model(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, served_name="org/name")
    async with bench.session.get(bench.url + "/v1/models/org/name") as response:
        one = await response.json()
        assert (response.status, one["id"], one["object"]) == (200, "org/name", "model")
    async with bench.session.get(bench.url + "/v1/models") as response:
        assert (await response.json())["data"] == [one]
    async with bench.session.get(bench.url + "/v1/models/other") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "model_not_found")
        assert "there is org/name" in error["message"]


async def test_one_model_needs_a_key_too(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, api_keys=(b"first",))
    async with bench.session.get(bench.url + "/v1/models/x") as response:
        assert response.status == 401


async def test_openai_client(start_bench: StartBench) -> None:
    bench = await start_bench()
    async with AsyncOpenAI(base_url=bench.url + "/v1", api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        stream = await client.chat.completions.create(**chat())
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        whole = await client.chat.completions.create(**chat(False))
        assert text == whole.choices[0].message.content


async def test_probes(start_bench: StartBench) -> None:
    bench = await start_bench({"p0": "prefill", "d0": "decode"})

    async def probe(path: str) -> tuple[int, dict[str, Any]]:
        async with bench.session.get(bench.url + path) as response:
            return response.status, await response.json()

    assert (await probe("/health"))[0] == 200
    assert await probe("/ready") == (200, {"ready": True, "reason": "a prefill and a decode worker are ready"})
    await bench["p0"].die()
    await bench.state("p0", "dead")
    status, answer = await probe("/ready")
    assert status == 200
    assert answer["reason"] == "degraded (no_prefill): 1 workers serve both phases"
    bench["d0"].draining = True
    await bench.state("d0", "draining")
    status, answer = await probe("/ready")
    assert status == 503
    assert "p0 dead, d0 draining" in answer["reason"]
    assert (await probe("/health"))[0] == 200
    status, answer = await probe("/v2/none")
    assert status == 404
    async with bench.session.get(bench.url + "/v1/completions") as response:
        assert response.status == 405


async def test_figures(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, ttft_objective=5.0, tpot_objective=2.0)
    bench["d0"].gap = 0.01
    for stream in (True, True, False):
        check(await ask(bench, completion(stream)), completion(stream))
    assert (await ask(bench, {**completion(), "model": "other"})).status == 404
    load = await bench.load()
    assert load["ready"] is True
    assert load["in_flight"] == 0
    assert load["attainment"] == 1.0
    assert load["requests"] == 3  # the 404 is left out
    assert 0 < load["ttft_p95_ms"] < 5000
    assert 9 < load["tpot_p95_ms"] < 1000
    totals = load["totals"]
    assert totals["generated_tokens"] == 36
    assert totals["offered_prompt_tokens"] == 3 * PROMPT_TOKENS
    assert totals["cached_prompt_tokens"] == 15
    assert totals["in_objective"] == 3
    workers = {worker["name"]: worker for worker in load["workers"]}
    assert workers["p0"]["load"]["compat_hash"] == "same"
    assert (workers["d0"]["role"], workers["d0"]["state"]) == ("decode", "ready")
    metrics = await bench.metrics()
    for line in (
        'forebay_router_requests_total{code="200",path="/v1/completions"} 3.0',
        'forebay_router_requests_total{code="404",path="/v1/completions"} 1.0',
        'forebay_router_time_to_first_token_seconds_bucket{le="2.5"} 3.0',
        'forebay_router_time_to_first_token_seconds_bucket{le="+Inf"} 3.0',
        # 12 tokens, two of them held back: 10 chunks, 9 gaps a stream.
        "forebay_router_inter_token_latency_seconds_count 18.0",
        'forebay_router_ttft_part_seconds_count{part="prefill"} 3.0',
        "forebay_router_generated_tokens_total 36.0",
        "forebay_router_requests_in_objective_total 3.0",
    ):
        assert line in metrics, line


async def test_work_is_spread(start_bench: StartBench) -> None:
    bench = await start_bench()
    for _ in range(12):
        await ask(bench, completion(tokens=3))
    calls = {name: len(worker.calls) for name, worker in bench.workers.items()}
    assert calls["p0"] + calls["p1"] == calls["d0"] + calls["d1"] == 12
    # Even up to what a load report on its way can shift: a request it does not cover yet counts as still there.
    assert all(4 <= count <= 8 for count in calls.values()), calls


async def test_a_changed_role_takes_effect(start_bench: StartBench) -> None:
    bench = await start_bench()
    bench["p1"].role = "decode"
    for name in ("d0", "d1"):
        bench[name].role = "prefill"
    bench.show()

    async def applied() -> bool:
        return bench.router.workers["p1"].role == "decode"

    await until(applied, "the roles are taken in", 5)
    answer = await ask(bench, completion())
    assert answer.headers["x-forebay-decode"] == "p1"
    assert answer.headers["x-forebay-prefill"] != "p1"


async def test_a_suspect_worker_gets_no_work(start_bench: StartBench) -> None:
    bench = await start_bench()
    bench["p0"].silent = bench["d1"].silent = True
    await bench.state("p0", "suspect")
    await bench.state("d1", "suspect")
    for _ in range(3):
        answer = await ask(bench, completion())
        assert (answer.headers["x-forebay-prefill"], answer.headers["x-forebay-decode"]) == ("p1", "d0")


@pytest.mark.parametrize("leg", ["prefill", "plain"])
@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_the_routers_token_is_no_word_to_the_client(
    start_bench: StartBench, leg: str, status: int
) -> None:
    """During a change of the secret: the client's own key is good."""
    bench = await start_bench()
    request_body = completion(n=1 if leg == "prefill" else 2)
    for worker in bench.workers.values():
        worker.faults[leg].append(Fault("status", status=status))
    answer = await ask(bench, request_body)
    if leg == "prefill":
        check(answer, request_body)  # both phases on a decode worker
    else:
        assert answer.status == 503
    assert f'reason="status_{status}"' in await bench.metrics()
