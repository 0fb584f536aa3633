"""The server's edges: who may call, what is bounded, who leaves."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from engine.server.reports import read_reports
from forebay_engine.core.handle import CoreDied, CoreStats
from forebay_wire import headers, paths
from forebay_wire.connections import MAX_BODY_BYTES, MAX_LEG_BYTES, ConnectionLimits
from support.fake_core import FakeCore

TEXT = {"model": "sim", "prompt": "hi there", "seed": 3, "max_tokens": 6, "ignore_eos": True}


async def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def raw_post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


INTERNAL: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", paths.HANDSHAKE, None),
    ("GET", paths.LOAD_STREAM, None),
    ("POST", paths.LEASE_HEARTBEAT, {"leases": [{"request_id": "r", "epoch": 1}]}),
    ("POST", paths.LEASE_COMPLETE, {"request_id": "r", "epoch": 1}),
    ("POST", paths.LEASE_CANCEL, {"request_id": "r"}),
    ("POST", paths.LEASE_PROGRESS, {"request_id": "r", "wait_seconds": 1e9}),
    (
        "POST",
        paths.RESERVE,
        {"request_id": "r", "prefill_host": "h", "prefill_port": 1, "prompt_tokens": 5, "ttl_seconds": 3.0},
    ),
    ("POST", paths.RELEASE, {"request_id": "r"}),
    ("POST", paths.CONTINUE, {}),
    ("POST", paths.DRAIN, {}),
]


@pytest.mark.parametrize(("method", "path", "body"), INTERNAL, ids=[path for _, path, _ in INTERNAL])
@pytest.mark.parametrize("offered", [None, "Bearer wrong", "Basic x", "Bearer", "Bearer caf\u00e9"])
async def test_internal_endpoints_need_the_bearer(
    worker: Any, method: str, path: str, body: Any, offered: str | None
) -> None:
    sent = {"authorization": offered} if offered else {}
    async with worker.session.request(method, worker.url + path, json=body, headers=sent) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"
    assert not worker.core.calls


async def test_a_compressed_body_is_refused_unread(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    for data in (b"no gzip at all", gzip.compress(json.dumps(TEXT).encode())):
        sent = {"content-encoding": "gzip", "content-type": "application/json"}
        async with worker.session.post(worker.url + paths.COMPLETIONS, data=data, headers=sent) as response:
            assert response.status == 415
            assert "content-encoding" in (await response.json())["error"]["message"]
    assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_without_a_token_internal_endpoints_are_closed(make_worker: Any) -> None:
    worker = make_worker()
    worker.secret = None
    async with worker:
        status, _, _ = await worker.post(paths.LEASE_CANCEL, {"request_id": "r"}, authorization="Bearer ")
        assert status == 403
        assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [case for case in INTERNAL if case[1] not in (paths.LOAD_STREAM, paths.CONTINUE, paths.DRAIN)],
    ids=lambda value: value if isinstance(value, str) and value.startswith("/") else "",
)
async def test_internal_endpoints_reach_the_core(worker: Any, method: str, path: str, body: Any) -> None:
    async with worker.session.request(method, worker.url + path, json=body, headers=worker.bearer) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    (name, argument) = worker.core.calls[0]
    assert name == path.rsplit("/", 1)[1]
    if name == "handshake":
        assert answer["engine_id"] == "engine-1"
    if name == "progress":
        assert argument.wait_seconds <= 30
    if name in ("cancel", "release"):
        assert argument == "r"


@pytest.mark.parametrize("body", [b"{", b'{"request_id": 5, "epoch": 1}', b'{"request_id": "r", "epoch": 1, "x": 2}'])
async def test_internal_bodies_are_checked(worker: Any, body: bytes) -> None:
    status, answer, _ = await worker.post(paths.LEASE_COMPLETE, body, **worker.bearer)
    assert status == 400
    assert answer["error"]["message"]


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a/b", "caf\u00e9"])
async def test_request_ids_are_bounded(worker: Any, bad: str) -> None:
    status, answer, _ = await worker.post(paths.COMPLETIONS, TEXT, x_request_id=bad)
    assert (status, answer["error"]["param"]) == (400, headers.REQUEST_ID)


async def test_a_request_without_an_id_gets_one(worker: Any) -> None:
    _, body, response = await worker.post(paths.COMPLETIONS, TEXT)
    assert body["id"] == "cmpl-" + response.headers[headers.REQUEST_ID]


async def test_unknown_paths_and_methods(worker: Any) -> None:
    for method, path, status in ("GET", "/nowhere", 404), ("GET", paths.CHAT, 405), ("POST", paths.HEALTH, 405):
        async with worker.session.request(method, worker.url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]


async def test_the_same_request_id_twice_at_once_disturbs_nobody(worker: Any) -> None:
    answers = await asyncio.gather(*(worker.post(paths.COMPLETIONS, TEXT, x_request_id="same") for _ in range(5)))
    assert {answer[1]["choices"][0]["text"] for answer in answers} == {answers[0][1]["choices"][0]["text"]}
    assert len({request.request_id for request in worker.core.requests}) == 5


async def test_a_body_announced_too_large_is_not_read(worker: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
    writer.write(f"POST {paths.COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert b" 413 " in head
    writer.close()


async def test_a_body_that_grows_too_large_is_cut_off(worker: Any) -> None:
    sent = 0

    async def body() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1_000_000
            yield b"x" * 1_000_000

    with contextlib.suppress(ConnectionError):
        async with worker.session.post(worker.url + paths.COMPLETIONS, data=body()) as response:
            assert response.status == 413
    assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200


async def test_a_leg_may_be_larger_than_a_clients_body_by_what_the_router_adds(worker: Any) -> None:
    text = {**TEXT, "user": "x" * MAX_BODY_BYTES}
    continued = {"path": paths.COMPLETIONS, "request": text, "created": 1, "cached_tokens": 0, "output_ids": [65]}
    for path, body in ((paths.COMPLETIONS, text), (paths.CONTINUE, {**continued, "prompt_tokens": None})):
        assert (await worker.post(path, body, **worker.bearer))[0] == 200
        assert (await worker.post(path, body))[0] == (413 if path == paths.COMPLETIONS else 401)
    status, answer, _ = await worker.post(paths.COMPLETIONS, {**TEXT, "user": "x" * MAX_LEG_BYTES}, **worker.bearer)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "later"])
async def test_a_client_that_leaves_ends_its_request(worker: Any, stream: bool, after: int) -> None:
    worker.core.gate, worker.core.gate_at = asyncio.Event(), after
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
    writer.write(raw_post(paths.COMPLETIONS, {**TEXT, "max_tokens": 200, "stream": stream}))
    await until(lambda: bool(worker.core.running), "the request runs")
    if after and stream:
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.transport.abort()
    took = await until(lambda: len(worker.core.aborted) == 1, "the core is told")
    assert took < 1
    await until(lambda: worker.state.in_flight == 0, "nothing is in flight")


async def test_a_client_that_leaves_while_the_router_waits_for_prefill_leaves_no_lease(worker: Any) -> None:
    worker.core.gate = asyncio.Event()
    body = {**TEXT, "kv_transfer_params": {"do_remote_decode": True, "client": {"max_tokens": 5}}}
    task = asyncio.create_task(worker.post(paths.COMPLETIONS, body, x_request_id="r1", **worker.bearer))
    await until(lambda: bool(worker.core.running), "the request runs")
    task.cancel()
    await until(lambda: worker.core.aborted == ["r1"], "the core is told", 1.0)


async def test_a_client_that_stops_reading_is_cut_off(make_worker: Any) -> None:
    core = FakeCore(max_model_len=1_000_000)
    core.script = list(b"a")
    async with make_worker(core, ConnectionLimits(write_seconds=0.3)) as worker:
        _, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port, limit=1024)
        writer.write(raw_post(paths.COMPLETIONS, {**TEXT, "max_tokens": 900_000, "stream": True}))
        await until(lambda: len(core.aborted) == 1, "the request is aborted", 20)
        await until(lambda: worker.state.in_flight == 0, "nothing is in flight")
        assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200
        writer.close()


async def test_the_unread_end_of_an_answer_does_not_hold_a_connection(make_worker: Any) -> None:
    core = FakeCore(max_model_len=1_000_000)
    core.script = list(b"a")
    async with make_worker(core, ConnectionLimits(write_seconds=0.3)) as worker:
        _, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port, limit=1024)
        body = {**TEXT, "max_tokens": 30_000, "logprobs": 2}
        writer.write(raw_post(paths.COMPLETIONS, {**body, "n": 2}))
        await until(lambda: len(core.requests) == 2 and not core.running, "the answer is made", 30)
        await until(lambda: worker.listener.connections == 0, "the connection is cut", 10)
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
async def test_half_sent_heads_and_idle_connections_are_closed(make_worker: Any, sent: bytes) -> None:
    async with make_worker(FakeCore(), ConnectionLimits(header_seconds=0.2, idle_seconds=0.4)) as worker:
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_head_in_drips_is_closed_too(make_worker: Any) -> None:
    async with make_worker(FakeCore(), ConnectionLimits(header_seconds=0.3)) as worker:
        _, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
        began = time.monotonic()

        async def drip() -> None:
            for character in b"POST /v1/completions HTTP/1.1\r\nx-long: " + b"y" * 1000:
                writer.write(bytes([character]))
                await writer.drain()
                await asyncio.sleep(0.02)

        with pytest.raises(ConnectionError):
            await drip()
        assert time.monotonic() - began < 5


async def test_a_half_sent_body_is_answered_with_408(make_worker: Any) -> None:
    async with make_worker(FakeCore(), ConnectionLimits(body_seconds=0.2)) as worker:
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
        await until(lambda: worker.state.in_flight == 0, "nothing is in flight")


async def test_connections_are_bounded(make_worker: Any) -> None:
    async with make_worker(FakeCore(), ConnectionLimits(max_connections=3)) as worker:
        held = [await asyncio.open_connection("127.0.0.1", worker.listener.port) for _ in range(3)]
        await until(lambda: worker.listener.connections == 3, "three are connected")
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
        assert b" 503 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
        held.pop()[1].close()
        await until(lambda: worker.listener.connections == 2, "one has left")
        assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200
        for _, writer in held:
            writer.close()


async def test_requests_in_flight_are_bounded(make_worker: Any) -> None:
    async with make_worker(FakeCore(), max_running=1, max_waiting=1) as worker:
        worker.core.gate = asyncio.Event()
        tasks = [asyncio.create_task(worker.post(paths.COMPLETIONS, TEXT)) for _ in range(2)]
        await until(lambda: len(worker.core.running) == 2, "two run")
        status, _, response = await worker.post(paths.COMPLETIONS, TEXT)
        assert (status, response.headers["retry-after"]) == (429, "1")
        worker.core.gate.set()
        assert [(await task)[0] for task in tasks] == [200, 200]


@pytest.mark.parametrize("path", [paths.COMPLETIONS, "/nowhere"])
async def test_an_expectation_that_is_not_known_is_an_error_of_the_usual_shape(worker: Any, path: str) -> None:
    async with worker.session.post(worker.url + path, json=TEXT, headers={"expect": "tea"}) as response:
        assert response.status == 417
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with worker.session.post(worker.url + paths.COMPLETIONS, json=TEXT, expect100=True) as response:
        assert response.status == 200


async def test_keep_alive_connections_are_used_again(worker: Any) -> None:
    for _ in range(3):
        assert (await worker.post(paths.COMPLETIONS, TEXT))[0] == 200
    assert worker.listener.connections == 1


async def test_not_ready_while_loading(make_worker: Any) -> None:
    async with make_worker() as worker:
        worker.state.info = None
        assert (await worker.get(paths.HEALTH))[0] == 200
        status, body = await worker.get(paths.READY)
        assert status == 503
        assert "loaded" in body["error"]["message"]
        for path, body in ((paths.COMPLETIONS, TEXT), (paths.LEASE_CANCEL, {"request_id": "r"})):
            status, _, response = await worker.post(path, body, **worker.bearer)
            assert (status, response.headers["retry-after"]) == (503, "1")
        assert not (await read_reports(worker, 1))[0].ready


async def test_draining_refuses_new_requests_and_finishes_running_ones(worker: Any) -> None:
    gate = worker.core.gate = asyncio.Event()
    running = asyncio.create_task(worker.post(paths.COMPLETIONS, TEXT))
    await until(lambda: bool(worker.core.running), "the request runs")
    worker.core.stats = CoreStats(held_blocks=3)
    status, answer, _ = await worker.post(paths.DRAIN, {}, **worker.bearer)
    assert (status, answer) == (200, {"draining": True, "running": 1, "held_blocks": 3})
    assert worker.core.draining
    status, _, response = await worker.post(paths.COMPLETIONS, TEXT)
    assert (status, response.headers["retry-after"]) == (503, "1")
    status, body = await worker.get(paths.READY)
    assert status == 503
    assert "draining" in body["error"]["message"]
    reserve = {"request_id": "q", "prefill_host": "h", "prefill_port": 1, "prompt_tokens": 5, "ttl_seconds": 3.0}
    _, answer, _ = await worker.post(paths.RESERVE, reserve, **worker.bearer)
    assert answer["admitted"] is False
    status, answer, _ = await worker.post(paths.LEASE_COMPLETE, {"request_id": "r", "epoch": 1}, **worker.bearer)
    assert answer == {"unbroken": True}
    assert (await read_reports(worker, 1))[0].draining
    gate.set()
    assert (await running)[0] == 200
    await worker.post(paths.DRAIN, {"draining": False}, **worker.bearer)
    assert (await worker.get(paths.READY))[0] == 200
    assert not worker.core.draining


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_dead_core_fails_what_runs_and_the_health(worker: Any, stream: bool) -> None:
    gate = worker.core.gate = asyncio.Event()
    task = asyncio.create_task(worker.post(paths.COMPLETIONS, {**TEXT, "stream": stream}))
    await until(lambda: bool(worker.core.running), "the request runs")
    worker.core.dead = CoreDied("killed")
    gate.set()
    status, answer, _ = await task
    assert (status, answer["error"]["code"]) == (500, "engine_died")
    assert worker.state.died.is_set()
    assert (await worker.get(paths.HEALTH))[0] == 500
    assert (await worker.get(paths.READY))[0] == 503


async def test_a_client_that_leaves_between_two_writes_is_no_error(
    make_worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its transport may be closing when the handler has not been cancelled yet."""

    async def closing(*_: object) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async with make_worker(FakeCore()) as worker:
        with monkeypatch.context() as patch:
            patch.setattr("forebay_engine.server.answers.write", closing)
            with pytest.raises(aiohttp.ClientError):
                await worker.post("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 3, "stream": True})
        status, _, _ = await worker.post("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 3})
        assert status == 200
        assert worker.state.in_flight == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nsecret\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\0\r\n\r\n",
        raw_post(paths.COMPLETIONS, TEXT) + b'{"prompt": "secret"}\r\n\r\n',
        b"GET /" + b"secret" * 2000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["chunk", "header", "pipelined", "too long"],
)
async def test_broken_http_is_answered_and_not_logged(worker: Any, caplog: Any, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert json.loads(answer[answer.rindex(b"\r\n\r\n") :])["error"]["type"] == "invalid_request_error"
    assert b" 400 Bad Request" in answer
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(
    worker: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write finds the connection closed before the handler is cancelled."""

    async def closed(*_: object) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr("forebay_engine.server.answers.write", closed)
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.listener.port)
    writer.write(raw_post(paths.COMPLETIONS, {**TEXT, "stream": True}))
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert not worker.core.running
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
