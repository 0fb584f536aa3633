"""Clients that are slow, many or rude: nothing waits for them for ever, nothing grows with them."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from router.asking import ONE_PAIR, ask, check, completion
from router.conftest import Bench, StartBench
from support.cluster import until


async def connect(bench: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", bench.port)


def request_bytes(body: bytes, *headers: str) -> bytes:
    head = ["POST /v1/completions HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


async def answer_to(bench: Bench, data: bytes) -> bytes:
    reader, writer = await connect(bench)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_half_a_head(start_bench: StartBench, sent: bytes) -> None:
    """Also when it trickles: the time runs from its first byte."""
    bench = await start_bench(ONE_PAIR, header_timeout=0.4)
    reader, writer = await connect(bench)
    writer.write(sent)
    started = time.monotonic()

    async def trickle() -> None:
        while True:
            await asyncio.sleep(0.1)
            writer.write(b"x")

    task = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    except ConnectionResetError:
        pass
    finally:
        task.cancel()
        writer.close()
    assert 0.3 < time.monotonic() - started < 4


async def test_half_a_body(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, body_idle_timeout=0.3)
    answer = await answer_to(bench, request_bytes(b"x" * 100)[:-50])
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"50 bytes read" in answer


async def test_an_idle_connection(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, keepalive_timeout=0.3)
    assert await answer_to(bench, b"") == b""
    answer = await answer_to(bench, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nx-long: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["line", "path", "many", "nonsense"],
)
async def test_bad_heads(start_bench: StartBench, head: bytes) -> None:
    bench = await start_bench(ONE_PAIR)
    answer = await answer_to(bench, head)
    assert answer.split(b" ")[1] == b"400"
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"


async def test_expect_continue(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, max_body=1000)
    reader, writer = await connect(bench)
    body = json.dumps(completion(False)).encode()
    writer.write(request_bytes(b"", "expect: 100-continue").replace(b"length: 0", b"length: %d" % len(body)))
    async with asyncio.timeout(5):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    refused = request_bytes(b"", "expect: 100-continue").replace(b"length: 0", b"length: 1001")
    assert (await answer_to(bench, refused)).startswith(b"HTTP/1.1 413")


async def test_too_many_connections(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, max_connections=3)
    await bench.session.get(bench.url + "/health")
    held = [await connect(bench) for _ in range(2)]
    answer = await answer_to(bench, b"")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"].startswith("too many connections")
    for _, writer in held:
        writer.close()

    async def room() -> bool:
        return (await answer_to(bench, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 200")

    await until(room, "a closed connection makes room", 5)


async def test_too_many_requests(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, max_in_flight=2)
    gate = bench["p0"].gates["prefill"] = asyncio.Event()
    tasks = [asyncio.create_task(ask(bench, completion())) for _ in range(2)]

    async def full() -> bool:
        return bool((await bench.load())["in_flight"] == 2)

    await until(full, "two requests run", 5)
    refused = await ask(bench, completion())
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    gate.set()
    for answer in await asyncio.gather(*tasks):
        check(answer, completion())


async def test_a_client_that_does_not_read(start_bench: StartBench) -> None:
    """What is buffered for it is bounded: the worker is held up; after the write timeout its request is aborted."""
    bench = await start_bench(ONE_PAIR, write_timeout=1.0, suspect_after=30.0, stall_timeout=20.0)
    bench["d0"].pad = 10_000
    body = json.dumps(completion(tokens=5_000)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", bench.port, limit=2**12)
    writer.write(request_bytes(body))

    async def streams() -> bool:
        return bool(bench["d0"].legs("decode"))

    await until(streams, "the stream runs", 10)

    async def ended() -> bool:
        return (await bench.load())["in_flight"] == 0

    await until(ended, "the request is given up", 20)
    call = bench["d0"].legs("decode")[0]
    assert not call.done
    assert 'requests_total{code="499"' in await bench.metrics()
    writer.close()


async def test_pipelined_requests(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    body = json.dumps(completion(False)).encode()
    answer = await answer_to(bench, request_bytes(body) + request_bytes(body, "connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_http_1_0(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    body = json.dumps(completion()).encode()
    answer = await answer_to(bench, request_bytes(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_bodies_still_on_their_way_share_no_id(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    whole = request_bytes(json.dumps(completion(False)).encode(), "x-request-id: same", "connection: close")
    clients = [await connect(bench) for _ in range(2)]
    for _, writer in clients:
        writer.write(whole[:-5])
    # Answered after both heads were read: connections are served in the order in which they spoke.
    await bench.load()
    for _, writer in clients:
        writer.write(whole[-5:])
    async with asyncio.timeout(10):
        answers = [await reader.read() for reader, _ in clients]
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert len({call.leg_id for call in bench["p0"].calls}) == 2
    for _, writer in clients:
        writer.close()


async def test_bodies_take_bounded_room(start_bench: StartBench) -> None:
    """Of all that are held, half sent ones and those of running requests alike."""
    large = json.dumps(completion(False, pad="x" * 600)).encode()
    bench = await start_bench(ONE_PAIR, max_bodies=1000)
    _, slow = await connect(bench)
    slow.write(request_bytes(large)[:-5])
    await bench.load()
    answer = await answer_to(bench, request_bytes(large, "connection: close"))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"Retry-After: 1" in answer or b"retry-after: 1" in answer
    slow.close()

    async def room() -> bool:
        return (await answer_to(bench, request_bytes(large, "connection: close"))).startswith(b"HTTP/1.1 200")

    await until(room, "what the other took is free again", 5)
    check(await ask(bench, completion()), completion())


async def test_small_packets_are_sent_at_once_on_both_sides(start_bench: StartBench) -> None:
    """Without TCP_NODELAY a token may wait 40 ms for the peer's acknowledgement of the one before."""
    bench = await start_bench(ONE_PAIR)
    check(await ask(bench, completion()), completion())
    to_clients = [connection.transport for connection in bench.listener.connections]
    to_workers = [c._transport for idle in bench.router._client._pool._idle.values() for c in idle]
    assert to_clients
    assert to_workers
    for transport in (*to_clients, *to_workers):
        assert transport is not None
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
