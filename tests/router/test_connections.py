"""What the router's connections are held to by the base that workers share (forebay_wire.connections)."""

from __future__ import annotations

import asyncio
import json

import pytest

from forebay_router.main import parse_args
from router.asking import ONE_PAIR, completion
from router.conftest import StartBench
from router.test_server import answer_to, connect, request_bytes


async def test_an_expectation_that_is_not_known(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR)
    body = json.dumps(completion(False)).encode()
    answer = await answer_to(bench, request_bytes(body, "expect: tea", "connection: close"))
    assert answer.startswith(b"HTTP/1.1 417")
    error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
    assert (error["param"], error["type"]) == ("expect", "invalid_request_error")


async def test_a_connection_that_says_nothing_is_closed(start_bench: StartBench) -> None:
    bench = await start_bench(ONE_PAIR, keepalive_timeout=0.2)
    reader, writer = await connect(bench)
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(("given", "size"), [([], 512), (["--body-memory-mib", "64"], 64)])
def test_room_for_bodies_is_set_on_the_command_line(given: list[str], size: int) -> None:
    assert parse_args(["--workers-file", "w.json", *given]).max_bodies == size * 1024 * 1024


@pytest.mark.parametrize("given", ["7", "0", "-1", "x", "2000000"])
def test_too_little_room_for_bodies_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--workers-file", "w.json", "--body-memory-mib", given])
    assert caught.value.code == 2
    assert "--body-memory-mib" in capsys.readouterr().err
