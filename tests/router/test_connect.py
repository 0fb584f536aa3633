"""Connections to workers that come late."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from forebay_router.upstream import CONNECT_ATTEMPTS
from forebay_router.workers import Worker
from router.conftest import Bench, StartBench
from router.test_rules import ask, check, completion


def never_connected(monkeypatch: pytest.MonkeyPatch, bench: Bench, times: int) -> list[str]:
    """The router's next `times` requests to workers find no connection in time; the URLs they were for."""
    original, session, late = aiohttp.ClientSession.post, bench.router._client._session, []

    def post(self: aiohttp.ClientSession, url: str, **kwargs: Any) -> Any:
        if self is not session or len(late) >= times:
            return original(self, url, **kwargs)
        late.append(url)

        async def fail() -> None:
            raise aiohttp.ConnectionTimeoutError

        return fail()

    monkeypatch.setattr(aiohttp.ClientSession, "post", post)
    return late


@pytest.mark.parametrize("stream", [True, False])
async def test_a_burst_condemns_no_worker_that_speaks(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """In a burst it is the router that is late, for all its workers at once."""
    bench = await start_bench()
    late = never_connected(monkeypatch, bench, CONNECT_ATTEMPTS - 1)
    check(await ask(bench, completion(stream)), completion(stream))
    assert len(late) == CONNECT_ATTEMPTS - 1
    assert {worker["state"] for worker in (await bench.load())["workers"]} == {"ready"}
    assert 'reason="connect_timeout"' not in await bench.metrics()


async def test_a_silent_worker_is_asked_once(start_bench: StartBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await start_bench()
    monkeypatch.setattr(Worker, "suspect", lambda self, now: True)
    late = never_connected(monkeypatch, bench, 4)
    answer = await ask(bench, completion())
    assert len(late) == len(set(late)), "no address twice"
    assert answer.status in (200, 503)
