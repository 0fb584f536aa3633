"""What a client may get wrong: a clear OpenAI-shaped error that names the field, nothing disturbed."""

import asyncio
import json

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from forebay_wire import headers, paths
from forebay_wire.connections import MAX_BODY_BYTES
from forebay_wire.transfer import KVTransferParams, sign
from support.client import complete
from support.cluster import TOKEN, Cluster, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

GOOD = {"model": "simulated", "prompt": "hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    args = ["--perf-model", "instant", "--max-model-len", "2048", "--lease-seconds", "6", "--pull-timeout-seconds", "3"]
    async with Cluster(tmp_path_factory.mktemp("bad"), worker_args=args) as running:
        yield running


def without(body, *names):
    return {key: value for key, value in body.items() if key not in names}


CASES = {
    "unknown model": ({**GOOD, "model": "gpt-9"}, 404, "model"),
    "no model": (without(GOOD, "model"), 400, "model"),
    "no prompt": (without(GOOD, "prompt"), 400, "prompt"),
    "empty prompt": ({**GOOD, "prompt": ""}, 400, "prompt"),
    "empty ids": ({**GOOD, "prompt": []}, 400, "prompt"),
    "prompt is a number": ({**GOOD, "prompt": 7}, 400, "prompt"),
    "negative id": ({**GOOD, "prompt": [1, -1]}, 400, "prompt"),
    "id out of range": ({**GOOD, "prompt": [1, 10**9]}, 400, "prompt"),
    "lone surrogate": ({**GOOD, "prompt": "a\ud800b"}, 400, None),
    "unknown field": ({**GOOD, "temprature": 1}, 400, "temprature"),
    "tools": ({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    "tool_choice": ({**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    "json mode": ({**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    "logit_bias": ({**GOOD, "logit_bias": {"5": 10}}, 400, "logit_bias"),
    "temperature below 0": ({**GOOD, "temperature": -0.1}, 400, "temperature"),
    "temperature is text": ({**GOOD, "temperature": "hot"}, 400, "temperature"),
    "top_p of 0": ({**GOOD, "top_p": 0}, 400, "top_p"),
    "top_p above 1": ({**GOOD, "top_p": 1.1}, 400, "top_p"),
    "top_k below -1": ({**GOOD, "top_k": -5}, 400, "top_k"),
    "min_p above 1": ({**GOOD, "min_p": 2}, 400, "min_p"),
    "penalty out of range": ({**GOOD, "presence_penalty": 3}, 400, "presence_penalty"),
    "repetition of 0": ({**GOOD, "repetition_penalty": 0}, 400, "repetition_penalty"),
    "max_tokens of 0": ({**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    "max_tokens is a bool": ({**GOOD, "max_tokens": True}, 400, "max_tokens"),
    "max_tokens over the limit": ({**GOOD, "max_tokens": 4096}, 400, "max_tokens"),
    "min over max": ({**GOOD, "min_tokens": 20}, 400, "min_tokens"),
    "n of 0": ({**GOOD, "n": 0}, 400, "n"),
    "n of a million": ({**GOOD, "n": 1_000_000}, 400, "n"),
    "10,000 stops": ({**GOOD, "stop": ["x"] * 10_000}, 400, "stop"),
    "empty stop": ({**GOOD, "stop": [""]}, 400, "stop"),
    "too many logprobs": ({**GOOD, "logprobs": 10_000}, 400, "logprobs"),
    "messages empty": ({**CHAT, "messages": []}, 400, "messages"),
    "best_of over n": ({**GOOD, "best_of": 2}, 400, "best_of"),
    "role unknown": ({**CHAT, "messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages"),
    "image part": (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages",
    ),
    "params from a client": ({**GOOD, "kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params"),
    "stream_options alone": ({**GOOD, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "stream is text": ({**GOOD, "stream": "yes"}, 400, "stream"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_refused_with_the_field_named(cluster, case, stream):
    body, status, param = CASES[case]
    if "stream" not in body and case != "stream_options alone":
        body = {**body, "stream": stream}
    path = paths.CHAT if "messages" in body else paths.COMPLETIONS
    async with cluster.session.post(cluster.router.url + path, data=json.dumps(body)) as response:
        assert response.status == status, await response.text()
        error = (await response.json())["error"]
    assert error["message"]
    assert error["type"]
    if param is not None:
        assert param in (error["param"] or ""), error
        assert param in error["message"], error


async def test_over_the_limit_names_both_numbers(cluster):
    answer = await complete(cluster.session, cluster.router.url, {**GOOD, "max_tokens": 4096, "stream": True})
    assert answer.status == 400
    assert "4096" in answer.error["message"]
    assert "2048" in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({**CHAT, "messages": [{"role": "robot", "content": "hi"}]}, "use one of system, developer, user, assistant,"),
        ({**GOOD, "best_of": 2}, "it may only equal n, which is 1; leave it out"),
    ],
    ids=["role", "best_of"],
)
async def test_what_is_allowed_is_said(cluster, body, remedy):
    path = paths.CHAT if "messages" in body else paths.COMPLETIONS
    async with cluster.session.post(cluster.router.url + path, json=body) as response:
        assert response.status == 400
        assert remedy in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "simulated", "prompt": "\xff"}', b"{}" * 2]
)
async def test_malformed_bodies(cluster, data):
    async with cluster.session.post(cluster.router.url + paths.COMPLETIONS, data=data) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("text", ['"temperature": NaN', '"temperature": 1e999', '"top_p": -Infinity'])
async def test_numbers_that_are_none(cluster, text):
    data = '{"model": "simulated", "prompt": "x", ' + text + "}"
    async with cluster.session.post(cluster.router.url + paths.COMPLETIONS, data=data) as response:
        assert response.status == 400


async def test_100_mb_body(cluster):
    async def body():
        for _ in range(100):
            yield b"x" * 1_000_000

    try:
        async with cluster.session.post(cluster.router.url + paths.COMPLETIONS, data=body()) as response:
            assert response.status == 413
    except aiohttp.ClientConnectionError:
        pass  # the router may close while we still send
    answer = await complete(cluster.session, cluster.router.url, GOOD)
    assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_largest_body_is_served_by_both_legs_and_one_byte_more_by_none(cluster, stream):
    """A leg holds more than what the client sent: what it may have is the router's to say, not the workers'."""
    body = {**GOOD, "stream": stream, "user": ""}
    body["user"] = "x" * (MAX_BODY_BYTES - len(json.dumps(body).encode()))
    for more, status in (0, 200), (1, 413):
        data = json.dumps({**body, "user": body["user"] + "x" * more}).encode()
        assert len(data) == MAX_BODY_BYTES + more
        async with cluster.session.post(cluster.router.url + paths.COMPLETIONS, data=data) as response:
            assert response.status == status, (await response.text())[:2000]
            if status == 200:
                assert (response.headers[headers.PREFILL], response.headers[headers.DECODE]) == ("p0", "d0")
                assert '"finish_reason":"length"' in await response.text()


async def test_half_sent_requests_and_idle_connections_disturb_nobody(cluster):
    connections = []
    for index in range(1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
        if index % 4 == 0:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
        elif index % 4 == 1:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        connections.append((reader, writer))
    answer = await asyncio.wait_for(complete(cluster.session, cluster.router.url, GOOD), 5)
    assert answer.status == 200
    for _, writer in connections:
        writer.close()


async def test_a_client_that_stops_reading_is_dropped_or_waits_alone(cluster):
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
    body = json.dumps({**GOOD, "max_tokens": 1500, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answers = await asyncio.gather(*(complete(cluster.session, cluster.router.url, GOOD) for _ in range(10)))
    assert all(answer.status == 200 for answer in answers)
    writer.close()
    await cluster.assert_nothing_left(seconds=10)


async def hand_off(cluster, request_id):
    """kv_transfer_params as the prefill worker signs them."""
    body = {**GOOD, "prompt": f"a prompt for {request_id} that fills more than one block", "max_tokens": 1}
    body["kv_transfer_params"] = {"do_remote_decode": True, "client": {"max_tokens": 8}}
    auth = {**cluster.internal, headers.REQUEST_ID: request_id}
    async with cluster.session.post(cluster.workers["p0"].url + paths.COMPLETIONS, json=body, headers=auth) as response:
        assert response.status == 200, await response.text()
        params = (await response.json())["kv_transfer_params"]
    body["max_tokens"] = 8
    body["kv_transfer_params"] = params
    return body, auth


async def decode(cluster, body, auth):
    async with cluster.session.post(cluster.workers["d0"].url + paths.COMPLETIONS, json=body, headers=auth) as response:
        return response.status, await response.json()


async def test_params_as_signed_are_taken_once(cluster):
    body, auth = await hand_off(cluster, "good-1")
    status, answer = await decode(cluster, body, auth)
    assert status == 200
    again, replayed = await decode(cluster, body, auth)
    # A replay finds no lease: the prompt is computed, the text is the same, and nobody's blocks are read.
    assert again == 200
    assert replayed["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": [10**6]},
        {"remote_engine_id": "another"},
        {"remote_host": "127.0.0.9"},
        {"model": "other"},
        {"compat_hash": "0" * 64},
        {"signature": "0" * 64},
        {"surprise": 1},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_tampered_params(cluster, change):
    body, auth = await hand_off(cluster, f"tampered-{next(iter(change))}")
    body["kv_transfer_params"] = {**body["kv_transfer_params"], **change}
    status, answer = await decode(cluster, body, auth)
    assert status == 400
    assert "kv_transfer_params" in answer["error"]["param"]


async def test_an_expired_lease_is_noticed_and_the_prompt_computed(cluster):
    """Its blocks are someone else's by then."""
    body, auth = await hand_off(cluster, "expired")
    before = await cluster.load("d0")

    async def expired() -> bool:
        return (await cluster.load("p0")).held_blocks == 0

    await until(expired, "the lease has run out", 60)
    status, answer = await decode(cluster, body, auth)
    assert status == 200
    assert (await cluster.load("d0")).recomputed_total == before.recomputed_total + 1
    assert answer["choices"][0]["text"] == await alone(cluster, body)


@pytest.mark.parametrize("wrong", [[10**6, 10**6 + 1], "one more", "one less", "the same twice"], ids=str)
async def test_well_signed_block_ids_that_cannot_be_make_no_wrong_text(cluster, wrong):
    body, auth = await hand_off(cluster, f"blocks-{str(wrong)[:5].strip('[').replace(' ', '-')}")
    params = msgspec.convert(body["kv_transfer_params"], KVTransferParams)
    blocks = list(params.remote_block_ids)
    assert len(blocks) > 2
    known = {
        "one more": [*blocks, blocks[-1] + 1],
        "one less": blocks[:-1],
        "the same twice": [*blocks[:-1], blocks[0]],
    }
    forged = msgspec.structs.replace(params, remote_block_ids=known.get(str(wrong), wrong))
    body["kv_transfer_params"] = msgspec.to_builtins(sign(forged, TOKEN.encode()))
    status, answer = await decode(cluster, body, auth)
    assert status in (200, 400), answer
    if status == 200:
        assert answer["choices"][0]["text"] == await alone(cluster, body)


async def alone(cluster, body) -> str:
    """What one undisturbed worker says to it."""
    plain = without(body, "kv_transfer_params")
    return (await complete(cluster.session, cluster.workers["p0"].url, plain)).text


@pytest.mark.parametrize("change", [{"model": "other"}, {"compat_hash": "0" * 64}, {"expires_unix": 1.0}])
async def test_well_signed_but_wrong_params(cluster, change):
    body, auth = await hand_off(cluster, f"wrong-{next(iter(change))}")
    params = msgspec.convert(body["kv_transfer_params"], KVTransferParams)
    forged = sign(msgspec.structs.replace(params, **change), TOKEN.encode())
    body["kv_transfer_params"] = msgspec.to_builtins(forged)
    status, answer = await decode(cluster, body, auth)
    assert status == 400
    assert "kv_transfer_params" in answer["error"]["param"]


async def test_params_of_another_request(cluster):
    body, auth = await hand_off(cluster, "mine")
    status, _ = await decode(cluster, body, {**auth, headers.REQUEST_ID: "yours"})
    assert status == 400


@pytest.mark.parametrize("bearer", [None, "Bearer wrong", "Basic abc"])
async def test_internal_endpoints_need_the_secret(cluster, bearer):
    auth = {} if bearer is None else {"authorization": bearer}
    for path in (paths.HANDSHAKE, paths.LOAD_STREAM):
        async with cluster.session.get(cluster.workers["p0"].url + path, headers=auth) as response:
            assert response.status == 401
    for path in (paths.LEASE_CANCEL, paths.LEASE_COMPLETE, paths.RESERVE, paths.CONTINUE, paths.DRAIN):
        async with cluster.session.post(cluster.workers["p0"].url + path, json={}, headers=auth) as response:
            assert response.status == 401


async def test_nothing_is_left_and_service_goes_on(cluster):
    answer = await complete(cluster.session, cluster.router.url, GOOD)
    assert answer.status == 200

    async def healthy() -> bool:
        async with cluster.session.get(cluster.router.url + paths.READY) as response:
            return response.status == 200

    await until(healthy, "the router is ready", 5)
    await cluster.assert_nothing_left(seconds=30)
