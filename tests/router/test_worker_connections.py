"""Connections to workers: which are used again, what is read of them, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from forebay_router.connections import HIGH_WATER, Connection, Pool
from forebay_router.http1 import BadResponse
from support.cluster import until

REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Runs a script for each connection."""

    script: Script
    port: int = 0
    connections: list[asyncio.StreamWriter] = field(default_factory=list)
    ended: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self.script(reader, writer)
        self.ended += 1
        writer.close()


StartServer = Callable[[Script], Awaitable[Server]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(script: Script) -> Server:
            made = Server(script)
            server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
            made.port = server.sockets[0].getsockname()[1]
            stack.callback(server.close)
            return made

        yield start


@contextlib.contextmanager
def pool_of(idle_seconds: float = 15.0) -> Iterator[Pool]:
    made = Pool(asyncio.get_running_loop(), 5.0, idle_seconds)
    try:
        yield made
    finally:
        made.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def answers(*parts: bytes) -> Script:
    """Each request gets the next answer."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            await head_of(reader)
            writer.write(part)
        await reader.read()

    return script


async def whole(connection: Connection) -> bytes:
    await connection.ask(REQUEST)
    parts = []
    while part := await connection.read():
        parts.append(part)
    return b"".join(parts)


async def test_a_connection_serves_again_and_again(start_server: StartServer) -> None:
    server = await start_server(answers(EMPTY, CHUNKED + b"2\r\nab\r\n0\r\n\r\n", EMPTY))
    with pool_of() as pool:
        for body in (b"", b"ab", b""):
            connection = await pool.take("127.0.0.1", server.port)
            assert await whole(connection) == body
            pool.give_back("127.0.0.1", server.port, connection)
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        EMPTY + b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_that_cannot_serve_again_does_not(start_server: StartServer, answer: bytes) -> None:
    server = await start_server(answers(answer, answer))
    with pool_of() as pool:
        for _ in range(2):
            connection = await pool.take("127.0.0.1", server.port)
            assert await whole(connection) == b""
            pool.give_back("127.0.0.1", server.port, connection)
        assert len(server.connections) == 2


async def test_what_an_idle_connection_sends_ends_it(start_server: StartServer) -> None:
    """Else it would be taken for the answer to the next request."""
    server = await start_server(answers(EMPTY, EMPTY))
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await whole(connection)
        pool.give_back("127.0.0.1", server.port, connection)
        server.connections[0].write(EMPTY)

        async def ended() -> bool:
            return not connection.usable

        await until(ended, "the connection is closed", 10)
        again = await pool.take("127.0.0.1", server.port)
        assert again is not connection
        again.abort()


async def test_idle_connections_are_closed_after_a_while(start_server: StartServer) -> None:
    server = await start_server(answers(EMPTY))
    with pool_of(idle_seconds=0.05) as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await whole(connection)
        pool.give_back("127.0.0.1", server.port, connection)

        async def ended() -> bool:
            return server.ended == 1

        await until(ended, "the worker sees the end", 10)


async def test_where_nobody_listens_there_is_no_connection() -> None:
    with socket.socket() as bound, pool_of() as pool:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match=r"refused|Connect"):
            await pool.take("127.0.0.1", bound.getsockname()[1])


@pytest.mark.parametrize("cut", [b"", b"HTTP/1.1 200", CHUNKED, CHUNKED + b"5\r\nab"])
@pytest.mark.parametrize("reset", [False, True])
async def test_an_answer_that_is_cut_is_an_error(start_server: StartServer, cut: bytes, reset: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(cut)
        if reset:
            writer.transport.abort()

    server = await start_server(script)
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        with pytest.raises((ConnectionError, BadResponse)):
            await whole(connection)


async def test_no_http_is_an_error(start_server: StartServer) -> None:
    server = await start_server(answers(b"220 mail.example ESMTP\r\n\r\n"))
    with pool_of() as pool, pytest.raises(BadResponse, match="status line"):
        await whole(await pool.take("127.0.0.1", server.port))


async def test_a_sink_gets_what_comes_until_it_has_enough(start_server: StartServer) -> None:
    server = await start_server(answers(CHUNKED + b"1\r\na\r\n", b""))
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await connection.ask(REQUEST)
        got: list[bytes] = []

        def sink(data: bytes) -> bool:
            got.append(data)
            if got == [b"a"]:
                server.connections[0].write(b"1\r\nb\r\n")
            return data == b"b"

        assert await connection.push(sink) is True
        server.connections[0].write(b"1\r\nc\r\n0\r\n\r\n")
        rest: list[bytes] = []
        assert await connection.push(lambda data: bool(rest.append(data))) is False
        assert (got, rest) == ([b"a", b"b"], [b"c"])
        assert connection.ended


async def test_what_a_sink_raises_comes_out_and_ends_the_connection(start_server: StartServer) -> None:
    server = await start_server(answers(CHUNKED + b"1\r\na\r\n"))
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await connection.ask(REQUEST)

        def sink(data: bytes) -> bool:
            raise LookupError(data)

        with pytest.raises(LookupError):
            await connection.push(sink)

        async def ended() -> bool:
            return server.ended == 1

        await until(ended, "the worker sees the end", 10)


async def test_a_response_that_nobody_reads_holds_its_worker_up(start_server: StartServer) -> None:
    """The memory of an unread response is bounded; reading it goes on where it stopped."""
    size, count = 64 * 1024, 400
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (size * count))
        for _ in range(count):
            writer.write(b"x" * size)
            await writer.drain()
            sent += 1

    server = await start_server(script)
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await connection.ask(REQUEST)
        seen = -1

        async def stopped() -> bool:
            nonlocal seen
            before, seen = seen, sent
            return seen == before

        await until(stopped, "the worker is held up", 10, 0.1)
        assert sent < count
        assert connection._unread < HIGH_WATER + 512 * 1024
        total = 0
        while part := await connection.read():
            total += len(part)
        assert total == size * count


async def test_what_a_sink_has_taken_stands_though_the_connection_broke_meanwhile(start_server: StartServer) -> None:
    """The end of a stream that came with its worker's last breath is an end: nobody is to be asked for it again."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")

    server = await start_server(script)
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        await connection.ask(REQUEST)

        async def broken() -> bool:
            return not connection.usable and connection._error is not None

        await until(broken, "the worker's end is seen", 10)
        assert await connection.push(lambda data: data == b"a") is True
        with pytest.raises(ConnectionError):
            await connection.push(lambda data: True)


async def test_a_worker_that_answers_before_it_has_the_request_gets_no_other_on_that_connection(
    start_server: StartServer,
) -> None:
    done = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(EMPTY)
        await done.wait()

    server = await start_server(script)
    body = b"x" * (64 * 1024 * 1024)  # more than sockets hold
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)
        head = await connection.ask(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert (head.status, await connection.read()) == (200, b"")
        pool.give_back("127.0.0.1", server.port, connection)
        again = await pool.take("127.0.0.1", server.port)
        assert again is not connection
        again.abort()
    done.set()


REFUSAL = b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"


def refuses(answer: bytes, *, close: bool) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if not close:
            await reader.read()

    return script


async def spoken_to(pool: Pool, port: int, *, closed: bool) -> Connection:
    connection = await pool.take("127.0.0.1", port)

    async def heard() -> bool:
        return bool(connection._unasked) and connection.usable != closed

    await until(heard, "what the worker says is here", 10)
    return connection


@pytest.mark.parametrize("close", [True, False])
async def test_a_worker_that_takes_no_connection_more_is_heard(start_server: StartServer, close: bool) -> None:
    """It says so at once, mostly before it is asked: a busy worker, not a broken one."""
    server = await start_server(refuses(REFUSAL, close=close))
    with pool_of() as pool:
        connection = await spoken_to(pool, server.port, closed=close)
        head = await connection.ask(REQUEST)
        assert (head.status, head.headers["retry-after"]) == (503, "1")
        assert await connection.read() == b"{}"
        assert await connection.read() == b""
        pool.give_back("127.0.0.1", server.port, connection)
        again = await pool.take("127.0.0.1", server.port)
        assert again is not connection
        again.abort()


@pytest.mark.parametrize("answer", [EMPTY, REFUSAL[:9], REFUSAL[:40], b"220 mail.example ESMTP\r\n\r\n"])
async def test_nothing_but_a_refusal_is_taken_unasked(start_server: StartServer, answer: bytes) -> None:
    server = await start_server(refuses(answer, close=True))
    with pool_of() as pool:
        connection = await spoken_to(pool, server.port, closed=True)
        with pytest.raises((ConnectionError, BadResponse)):
            await connection.ask(REQUEST)


async def test_what_is_said_unasked_is_bounded(start_server: StartServer) -> None:
    server = await start_server(refuses(b"x" * 1024 * 1024, close=False))
    with pool_of() as pool:
        connection = await pool.take("127.0.0.1", server.port)

        async def cut() -> bool:
            return not connection.usable

        await until(cut, "the connection is closed", 10)
