"""A source's thread is its own, and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from forebay_operator.observe import prometheus
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.prometheus import Asked, Credentials, PrometheusSource
from support.rude_server import Answer, drip, serving, silence, whole

EMPTY = whole(b'{"status": "success", "data": {"resultType": "vector", "result": []}}')
DRIP = drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", times=200)
FLEET = Fleet((), ())


async def _none() -> Credentials:
    return Credentials()


def _source(at: str, model: str) -> PrometheusSource:
    return PrometheusSource(Asked(f"http://{at}", "llm", model), time.time, credentials=_none)


def _threads(model: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(f" {model}")]


@pytest.mark.parametrize("rude", [silence, DRIP], ids=["silence", "drip"])
async def test_no_source_waits_for_anothers(rude: Answer) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    with ExitStack() as stack:
        rude_at, good_at = stack.enter_context(serving(rude)), stack.enter_context(serving(EMPTY))
        hanging = [_source(rude_at, f"hanging-{number}") for number in range(12)]
        good = _source(good_at, "good")
        looks = [asyncio.create_task(source.observe(FLEET)) for source in hanging]
        while any(source._query_running is None for source in hanging):
            await asyncio.sleep(0)
        async with asyncio.timeout(5.0):
            seen = await good.observe(FLEET)
        assert not any(look.done() for look in looks)
        assert "let it scrape the PodMonitor" in seen.signals[0].note
        for look in looks:
            look.cancel()
        for source in (*hanging, good):
            await source.close()


@pytest.mark.parametrize("rude", [silence, DRIP], ids=["silence", "drip"])
async def test_a_source_that_is_dropped_leaves_no_thread(rude: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "DEADLINE_SECONDS", 0.5)
    with serving(rude) as at:
        source = _source(at, "dropped")
        for _ in range(3):
            await source._ask()
            assert len(_threads("dropped")) <= 1
        question = source._query_running
        assert question is not None
        await source.close()
        await asyncio.wait({question}, timeout=5 * prometheus.DEADLINE_SECONDS)
        assert question.done()
        for thread in _threads("dropped"):
            thread.join(5.0)
            assert not thread.is_alive()


async def test_an_answered_source_holds_no_thread() -> None:
    with serving(EMPTY) as at:
        source = _source(at, "answered")
        await source.observe(FLEET)
        for thread in _threads("answered"):
            thread.join(5.0)
            assert not thread.is_alive()
        await source.close()
