"""Connections to workers that come late."""

from __future__ import annotations

import pytest

from forebay_router.connections import Connection, Pool
from forebay_router.upstream import CONNECT_ATTEMPTS, WorkerClient
from forebay_router.workers import Worker
from router.asking import ask, check, completion
from router.conftest import StartBench


def never_connected(monkeypatch: pytest.MonkeyPatch, times: int) -> list[tuple[str, int]]:
    """The router's next `times` connections to workers do not come in time; the addresses they were for."""
    original, late = Pool.take, []

    async def take(self: Pool, host: str, port: int) -> Connection:
        if len(late) >= times:
            return await original(self, host, port)
        late.append((host, port))
        raise TimeoutError

    monkeypatch.setattr(Pool, "take", take)
    return late


@pytest.mark.parametrize("stream", [True, False])
async def test_a_burst_condemns_no_worker_that_speaks(
    start_bench: StartBench, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """In a burst it is the router that is late, for all its workers at once."""
    bench = await start_bench()
    late = never_connected(monkeypatch, CONNECT_ATTEMPTS - 1)
    check(await ask(bench, completion(stream)), completion(stream))
    assert len(late) == CONNECT_ATTEMPTS - 1
    assert {worker["state"] for worker in (await bench.load())["workers"]} == {"ready"}
    assert 'reason="connect_timeout"' not in await bench.metrics()


async def test_a_silent_worker_is_asked_once(start_bench: StartBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = await start_bench()
    monkeypatch.setattr(Worker, "suspect", lambda self, now: True)
    late, failed, original = never_connected(monkeypatch, 4), [], WorkerClient._connection

    async def connection(self: WorkerClient, worker: Worker) -> Connection:
        try:
            return await original(self, worker)
        except TimeoutError:
            failed.append(worker.name)
            raise

    monkeypatch.setattr(WorkerClient, "_connection", connection)
    answer = await ask(bench, completion())
    assert len(late) == len(failed) > 0, "one try each"
    assert answer.status in (200, 503)
