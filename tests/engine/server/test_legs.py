"""The law of hand-over: prefill's delta followed by decode's stream is the stream of one worker, at every cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from forebay_wire import paths, stream
from forebay_wire.transfer import CLIENT_LIMIT_FIELDS, KVTransferParams, sign, verify
from support.fake_core import FakeCore

TEXT = "hello caf\u00e9 \u20ac"
SEEDS = range(60)


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A request whose answer runs through held-back text, half characters, stop strings, logprobs and every end."""
    chat = rng.random() < 0.5
    body: dict[str, Any] = {"model": "sim", "seed": rng.randrange(10**9)}
    if chat:
        body["messages"] = [{"role": "user", "content": TEXT}]
    else:
        body["prompt"] = rng.choice([TEXT, list(TEXT.encode()), [TEXT]])
    if rng.random() < 0.9:
        body["max_completion_tokens" if chat and rng.random() < 0.5 else "max_tokens"] = rng.choice([1, 2, 3, 9, 30])
    if rng.random() < 0.5:
        body["stop"] = rng.choice(["END", ["END", "\u20ac"], ["aEb", "b\n", "\U0001f600a"], "E"])
    if rng.random() < 0.3:
        body["min_tokens"] = 1
    if rng.random() < 0.3:
        body["stop_token_ids"] = [98]
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.4:
        if chat:
            body["logprobs"] = True
            if rng.random() < 0.7:
                body["top_logprobs"] = 3
        else:
            body["logprobs"] = rng.choice([0, 2])
    if rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    return (paths.CHAT if chat else paths.COMPLETIONS), body


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What the router sends to prefill."""
    kept = {name: value for name, value in body.items() if name not in CLIENT_LIMIT_FIELDS}
    client = {name: body[name] for name in CLIENT_LIMIT_FIELDS if name in body}
    return {**kept, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "client": client}}


async def plain_stream(worker: Any, path: str, body: dict[str, Any], parse_sse: Any) -> list[Any]:
    status, raw, _ = await worker.post(path, body, x_request_id="r1", x_forebay_router="router")
    assert status == 200, raw
    return parse_sse(raw)


def chunks(events: list[Any]) -> list[str]:
    return [data.decode() for _, datas in events for data in datas]


@pytest.mark.parametrize("seed", SEEDS)
async def test_delta_and_decode_stream_are_the_plain_stream(make_worker: Any, parse_sse: Any, seed: int) -> None:
    path, body = random_body(random.Random(seed))
    body["stream"] = True
    workers = (
        make_worker(FakeCore()),
        make_worker(FakeCore(engine_id="p")),
        make_worker(FakeCore(engine_id="d", batch=3)),
    )
    async with workers[0] as single, workers[1] as prefill, workers[2] as decode:
        whole = await plain_stream(single, path, body, parse_sse)
        status, first, _ = await prefill.post(path, prefill_body(body), x_request_id="r1", **prefill.bearer)
        assert status == 200, first
        params = first["kv_transfer_params"]
        got = list(params["first"]["delta"] or [])
        if params["first"]["finish_reason"] is not None:
            assert [*got, "[DONE]"] == chunks(whole)
            assert "remote_block_ids" not in params
            return
        assert prefill.core.requests[0].hold
        assert prefill.core.requests[0].request_id == "r1"
        status, raw, _ = await decode.post(
            path, {**body, "kv_transfer_params": params}, x_request_id="r1", x_forebay_router="x", **decode.bearer
        )
        assert status == 200, raw
        events = parse_sse(raw)
        assert got + chunks(events) == chunks(whole)
        counted = [] if params["first"]["delta"] is None else params["first"]["state"]["output_ids"]
        assert counted + [t for ids, _ in events for t in ids] == [t for ids, _ in whole for t in ids]
        asked = decode.core.requests[0]
        assert asked.request_id == "r1"
        assert asked.pull is not None
        assert asked.pull.block_ids == [3, 1, 4]
        assert asked.output_ids == [params["first"]["token_id"]]


@pytest.mark.parametrize("seed", SEEDS)
async def test_whole_bodies_are_equal_too(make_worker: Any, seed: int) -> None:
    path, body = random_body(random.Random(seed))
    body.pop("stream_options", None)
    workers = make_worker(FakeCore(batch=2)), make_worker(FakeCore()), make_worker(FakeCore())
    async with workers[0] as single, workers[1] as prefill, workers[2] as decode:
        status, whole, _ = await single.post(path, body, x_request_id="r1")
        assert status == 200, whole
        _, first, _ = await prefill.post(path, prefill_body(body), x_request_id="r1", **prefill.bearer)
        params = first.pop("kv_transfer_params")
        assert params["first"]["delta"] is None
        if params["first"]["finish_reason"] is not None:
            assert first == whole
            return
        assert first["usage"]["completion_tokens"] == 1
        status, second, _ = await decode.post(
            path, {**body, "kv_transfer_params": params}, x_request_id="r1", **decode.bearer
        )
        assert status == 200
        assert second == whole


@pytest.mark.parametrize("seed", SEEDS[:25])
async def test_a_continuation_goes_on_at_every_cut(make_worker: Any, parse_sse: Any, seed: int) -> None:
    path, body = random_body(random.Random(seed))
    body["stream"] = True
    async with make_worker(FakeCore()) as first, make_worker(FakeCore(batch=2)) as second:
        whole = await plain_stream(first, path, body, parse_sse)
        request = {
            "path": path,
            "request": body,
            "created": json.loads(chunks(whole)[0])["created"],
            "prompt_tokens": len(first.core.requests[0].prompt_ids),
            "cached_tokens": len(first.core.requests[0].prompt_ids) // 16 * 16,
        }
        covered = [i for i, (ids, _) in enumerate(whole) if ids]
        for last in covered:
            ids = [t for got, _ in whole[: last + 1] for t in got]
            status, raw, _ = await second.post(
                paths.CONTINUE,
                {**request, "output_ids": ids},
                x_request_id="r1",
                x_forebay_router="router",
                **second.bearer,
            )
            assert status == 200, raw
            events = parse_sse(raw)
            assert chunks(events) == chunks(whole[last + 1 :])
            assert [t for got, _ in events for t in got] == [t for got, _ in whole[last + 1 :] for t in got]


async def test_a_continuation_without_ids_starts_the_answer(worker: Any, parse_sse: Any) -> None:
    body = {"model": "sim", "prompt": TEXT, "seed": 5, "max_tokens": 12, "stream": True}
    whole = await plain_stream(worker, paths.COMPLETIONS, body, parse_sse)
    status, raw, _ = await worker.post(
        paths.CONTINUE,
        {
            "path": paths.COMPLETIONS,
            "request": body,
            "created": json.loads(chunks(whole)[0])["created"],
            "prompt_tokens": len(TEXT.encode()),
            "cached_tokens": 0,
            "output_ids": [],
        },
        x_request_id="r1",
        **worker.bearer,
    )
    assert status == 200
    assert chunks(parse_sse(raw)) == chunks(whole)


async def test_a_whole_body_can_be_continued(worker: Any) -> None:
    body = {"model": "sim", "prompt": TEXT, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    _, whole, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1")
    ids = [worker.core.token(worker.core.requests[0], i) for i in range(5)]
    message = {
        "path": paths.COMPLETIONS,
        "request": body,
        "created": whole["created"],
        "prompt_tokens": len(TEXT.encode()),
        "cached_tokens": 0,
        "output_ids": ids,
    }
    status, second, _ = await worker.post(paths.CONTINUE, message, x_request_id="r1", **worker.bearer)
    assert status == 200
    assert second == whole
    assert worker.core.requests[1].output_ids == ids
    assert worker.core.requests[1].pull is None


GOOD = {"model": "sim", "prompt": TEXT, "seed": 1, "max_tokens": 9, "ignore_eos": True, "stream": True}


async def handed_over(worker: Any) -> dict[str, Any]:
    status, first, _ = await worker.post(paths.COMPLETIONS, prefill_body(GOOD), x_request_id="r1", **worker.bearer)
    assert status == 200
    return dict(first["kv_transfer_params"])


def change(path: str, value: Any) -> Any:
    def apply(params: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = params
        for parent in parents:
            target = target[parent]
        target[last] = value

    return apply


@pytest.mark.parametrize(
    "tamper",
    [
        change("remote_block_ids", [3, 1, 5]),
        change("remote_host", "evil"),
        change("remote_port", 1),
        change("first.token_id", 66),
        change("first.state.output_ids", [66]),
        change("cached_tokens", 1),
        change("expires_unix", 4e9),
        change("created", 5),
        change("signature", "0" * 64),
        change("signature", None),
        change("remote_request_id", "r2"),
        change("lease_epoch", 8),
    ],
)
async def test_tampered_params_are_refused(worker: Any, tamper: Any) -> None:
    params = await handed_over(worker)
    tamper(params)
    body = {**GOOD, "kv_transfer_params": params}
    status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
    assert status == 400
    assert answer["error"]["param"] == "kv_transfer_params"
    assert len(worker.core.requests) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"expires_unix": 1.0}, "kv_transfer_params"),
        ({"model": "other"}, "model"),
        ({"compat_hash": "other"}, "compat_hash"),
        ({"prompt_hash": "0" * 32}, "prompt_hash"),
        ({"remote_num_tokens": 3}, "remote_num_tokens"),
        ({"remote_block_ids": []}, "remote_block_ids"),
        ({"remote_block_ids": [-1]}, "remote_block_ids"),
        ({"remote_block_ids": [3, 1, 3]}, "remote_block_ids"),
        ({"remote_port": 0}, "remote_port"),
        ({"lease_epoch": None}, "remote_engine_id"),
    ],
)
async def test_genuine_params_for_something_else_are_refused(worker: Any, changes: dict[str, Any], field: str) -> None:
    import msgspec

    params = msgspec.convert(await handed_over(worker), KVTransferParams)
    resigned = sign(msgspec.structs.replace(params, **changes), worker.secret)
    body = {**GOOD, "kv_transfer_params": msgspec.to_builtins(resigned)}
    status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
    assert status == 400
    assert field in answer["error"]["param"]


async def test_params_are_for_one_request_id_and_prompt(worker: Any) -> None:
    params = await handed_over(worker)
    body = {**GOOD, "kv_transfer_params": params}
    status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r2", **worker.bearer)
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
    status, answer, _ = await worker.post(
        paths.COMPLETIONS, {**body, "prompt": TEXT[::-1]}, x_request_id="r1", **worker.bearer
    )
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params.prompt_hash")


async def test_ids_beyond_the_vocabulary_are_refused(worker: Any) -> None:
    import msgspec

    params = msgspec.convert(await handed_over(worker), KVTransferParams)
    assert params.first is not None
    params.first.state.output_ids = [260]
    body = {**GOOD, "kv_transfer_params": msgspec.to_builtins(sign(params, worker.secret))}
    status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
    assert status == 400
    assert "260" in answer["error"]["message"]


async def test_params_say_where_the_blocks_are_and_are_signed(worker: Any) -> None:
    import msgspec

    params = await handed_over(worker)
    assert params["remote_engine_id"] == "engine-1"
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.7", worker.listener.port)
    assert params["prompt_tokens"] == params["remote_num_tokens"] == len(TEXT.encode())
    verify(msgspec.convert(params, KVTransferParams), worker.secret, request_id="r1", now_unix=1_800_000_100.0)


@pytest.mark.parametrize("stop", [True, False], ids=["stop string", "stop id"])
async def test_an_answer_that_ends_with_its_first_token_leaves_no_lease(worker: Any, stop: bool) -> None:
    worker.core.script = [69]
    body = {**GOOD, "stream_options": {"include_usage": True}, **({"stop": "E"} if stop else {"stop_token_ids": [69]})}
    status, first, _ = await worker.post(paths.COMPLETIONS, prefill_body(body), x_request_id="r1", **worker.bearer)
    assert status == 200
    params = first["kv_transfer_params"]
    assert params["first"]["finish_reason"] == "stop"
    assert not params.get("do_remote_prefill")
    assert "remote_block_ids" not in params
    assert [json.loads(chunk)["choices"] == [] for chunk in params["first"]["delta"]] == [False, True]
    assert worker.core.aborted == (["r1"] if stop else [])


async def test_prefill_judges_the_clients_limits(worker: Any) -> None:
    for wrong, field in ({"max_tokens": 4096}, "max_tokens"), ({"stream": "yes"}, "stream"), ({"n": 0}, "n"):
        body = prefill_body({**GOOD, **wrong})
        status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
        assert (status, answer["error"]["param"]) == (400, field)


async def test_prefill_without_the_clients_limits_holds(worker: Any) -> None:
    body = {**GOOD, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    status, first, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
    assert status == 200
    assert first["kv_transfer_params"]["do_remote_prefill"]


async def test_legs_carry_one_answer(worker: Any) -> None:
    for several in ({"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}):
        body = prefill_body({**GOOD, **several})
        status, answer, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer)
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_held_back_text_makes_delta_null(worker: Any, parse_sse: Any) -> None:
    worker.core.script = [0xE2, 0x82, 0xAC, 33]
    params = await handed_over(worker)
    assert params["first"]["delta"] is None
    body = {**GOOD, "kv_transfer_params": params}
    _, raw, _ = await worker.post(paths.COMPLETIONS, body, x_request_id="r1", x_forebay_router="r", **worker.bearer)
    events = parse_sse(raw)
    assert events[:2] == [([0xE2], []), ([0x82], [])]
    assert events[2][0] == [0xAC]
    assert json.loads(events[2][1][0])["choices"][0]["text"] == "\u20ac"


async def test_comments_only_for_routers(worker: Any) -> None:
    body = {"model": "sim", "prompt": TEXT, "stream": True, "max_tokens": 4, "ignore_eos": True}
    _, raw, _ = await worker.post(paths.COMPLETIONS, body)
    assert stream.PREFIX not in raw
    _, raw, _ = await worker.post(paths.COMPLETIONS, body, x_forebay_router="r")
    assert raw.count(stream.PREFIX) == 4
