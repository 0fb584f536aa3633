"""A worker's life: listening before it is ready, draining on a signal, leaving when its core dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay_engine.core.handle import CoreDied, CoreStats
from forebay_engine.errors import ModelError
from forebay_engine.server import run
from forebay_engine.server.state import WorkerState
from forebay_engine.settings import WorkerSettings
from forebay_engine.text.simulated import SimulatedTokenizer
from forebay_wire import paths
from support.cluster import free_port
from support.fake_core import FakeCore

TEXT = {"model": "sim", "prompt": "hi there", "seed": 3, "max_tokens": 6, "ignore_eos": True}


class Life:
    def __init__(self, core: FakeCore, settings: WorkerSettings, session: aiohttp.ClientSession) -> None:
        self.core = core
        self.settings = settings
        self.session = session
        self.task = asyncio.create_task(run.serve(settings, core))

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"http://127.0.0.1:{self.settings.port}{path}") as response:
            return response.status, await response.json()

    async def post(self, body: Any) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.settings.port}{paths.COMPLETIONS}"
        async with self.session.post(url, json=body) as response:
            return response.status, await response.read()

    async def status(self, path: str) -> int:
        try:
            return (await self.get(path))[0]
        except aiohttp.ClientConnectorError:
            return 0

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not await condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            await asyncio.sleep(0.01)

    async def ready(self) -> None:
        async def is_ready() -> bool:
            return await self.status(paths.READY) == 200

        await self.until(is_ready, "ready")

    async def runs(self, count: int) -> None:
        async def is_running() -> bool:
            return len(self.core.running) == count

        await self.until(is_running, f"{count} run")


def make_settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(
        name="w1",
        engine="simulated",
        served_name="sim",
        host="127.0.0.1",
        port=free_port(),
        advertise_host="127.0.0.1",
        **{"token_file": None, **changes},
    )


@asynccontextmanager
async def living(core: FakeCore, **changes: Any) -> AsyncIterator[Life]:
    settings = make_settings(**changes)
    async with aiohttp.ClientSession() as session:
        life = Life(core, settings, session)
        try:
            yield life
        finally:
            life.task.cancel()
            await asyncio.gather(life.task, return_exceptions=True)


async def test_listens_before_the_model_is_loaded() -> None:
    core = FakeCore()
    core.loading = asyncio.Event()
    async with living(core) as life:

        async def alive() -> bool:
            return await life.status(paths.HEALTH) == 200

        await life.until(alive, "alive")
        status, body = await life.get(paths.READY)
        assert status == 503
        assert "being loaded" in body["error"]["message"]
        core.loading.set()
        await life.ready()
        assert (await life.post(TEXT))[0] == 200


async def test_sigterm_while_loading_ends_at_once() -> None:
    core = FakeCore()
    core.loading = asyncio.Event()
    async with living(core) as life:

        async def alive() -> bool:
            return await life.status(paths.HEALTH) == 200

        await life.until(alive, "alive")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life.task, 5) == run.EXIT_OK
        assert core.closed


async def test_sigterm_finishes_running_streams_and_waits_for_held_kv() -> None:
    core = FakeCore()
    async with living(core) as life:
        await life.ready()
        core.gate = asyncio.Event()
        running = asyncio.create_task(life.post({**TEXT, "stream": True}))
        await life.runs(1)
        core.stats = CoreStats(held_blocks=2)
        os.kill(os.getpid(), signal.SIGTERM)

        async def draining() -> bool:
            return await life.status(paths.READY) == 503

        await life.until(draining, "draining")
        assert core.draining
        assert (await life.post(TEXT))[0] == 503
        core.gate.set()
        status, raw = await running
        assert status == 200
        assert raw.endswith(b"data: [DONE]\n\n")
        assert not life.task.done()
        assert await life.status(paths.HEALTH) == 200
        core.stats = CoreStats()
        assert await asyncio.wait_for(life.task, 5) == run.EXIT_OK
        assert core.closed


async def test_a_lease_just_handed_out_is_waited_for_though_the_core_has_not_reported_it() -> None:
    settings = WorkerSettings("w", "simulated", "sim", "127.0.0.1", 0, "127.0.0.1", None)
    now = 100.0
    state = WorkerState(settings, FakeCore(), SimulatedTokenizer(), None, monotonic=lambda: now)
    state.last_hold = now
    draining = asyncio.create_task(run._drain(state))
    assert (await asyncio.wait({draining}, timeout=4 * run._DRAIN_POLL_SECONDS))[1] == {draining}
    now += run.HOLD_SETTLE_SECONDS
    await asyncio.wait_for(draining, 5)


async def test_the_drain_timeout_ends_what_is_left() -> None:
    core = FakeCore()
    async with living(core, drain_timeout_seconds=0.3) as life:
        await life.ready()
        core.gate = asyncio.Event()
        running = asyncio.create_task(life.post(TEXT))
        await life.runs(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(life.task, 15) == run.EXIT_OK
        with pytest.raises(aiohttp.ClientError):
            await running
        assert len(core.aborted) == 1


async def test_a_second_signal_ends_at_once() -> None:
    core = FakeCore()
    async with living(core) as life:
        await life.ready()
        core.stats = CoreStats(held_blocks=1)
        os.kill(os.getpid(), signal.SIGTERM)

        async def draining() -> bool:
            return await life.status(paths.READY) == 503

        await life.until(draining, "draining")
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(life.task, 5) == run.EXIT_FAILED


async def test_an_idle_cores_death_ends_the_worker() -> None:
    core = FakeCore()
    async with living(core) as life:
        await life.ready()
        core.dead = CoreDied("killed")
        assert await asyncio.wait_for(life.task, 5 * run.PING_SECONDS) == run.EXIT_FAILED


async def test_a_wedged_core_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never errs, and its last report says that it is idle: the router would send to it for ever."""
    monkeypatch.setattr(run, "PING_SECONDS", 0.02)
    core = FakeCore()
    async with living(core) as life:
        await life.ready()

        async def silent(leases: object) -> object:
            return await asyncio.Event().wait()

        monkeypatch.setattr(core, "heartbeat", silent)
        assert await asyncio.wait_for(life.task, 10) == run.EXIT_FAILED


async def test_a_ping_that_is_answered_late_now_and_then_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PING_SECONDS", 0.02)
    core, pings = FakeCore(), 0
    async with living(core) as life:
        await life.ready()
        answer = core.heartbeat

        async def late(leases: list[Any]) -> object:
            nonlocal pings
            pings += 1
            return await answer(leases) if pings % run.MISSED_PINGS == 0 else await asyncio.Event().wait()

        monkeypatch.setattr(core, "heartbeat", late)

        async def many() -> bool:
            return pings > 3 * run.MISSED_PINGS

        await life.until(many, "pings go on", 30)
        assert await life.status(paths.HEALTH) == 200


async def test_a_core_that_does_not_answer_gets_no_requests_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PING_SECONDS", 0.02)
    monkeypatch.setattr(run, "MISSED_PINGS", 10**6)
    core, awake = FakeCore(), asyncio.Event()
    async with living(core) as life:
        await life.ready()
        answer = core.heartbeat

        async def hanging(leases: list[Any]) -> object:
            await awake.wait()
            return await answer(leases)

        monkeypatch.setattr(core, "heartbeat", hanging)

        async def unready() -> bool:
            return await life.status(paths.READY) == 503

        await life.until(unready, "not ready")
        status, raw = await life.post(TEXT)
        assert status == 503
        assert "does not answer" in json.loads(raw)["error"]["message"]
        awake.set()
        await life.ready()
        assert (await life.post(TEXT))[0] == 200


@pytest.mark.parametrize(
    ("asked", "used", "status"),
    [
        ("shared-memory", "TCP", 503),
        ("shared-memory", "SharedMemory", 200),
        ("shared-memory", "Unknown", 200),
        ("rdma", "TCP", 503),
        ("tcp", "TCP", 200),
    ],
)
async def test_a_worker_is_never_ready_on_another_transport_than_the_required(
    asked: str, used: str, status: int
) -> None:
    core = FakeCore()
    core.stats = CoreStats(total_blocks=100, free_blocks=60)
    async with living(core, transport=asked, transport_required=True) as life:
        await life.ready()  # nothing was read yet
        core.stats = CoreStats(total_blocks=100, free_blocks=60, transport=used)
        answered, body = await life.get(paths.READY)
        assert answered == status
        if status == 503:
            assert f"KV moves over {used}" in body["error"]["message"]


async def test_a_cores_death_is_told_to_running_streams_first() -> None:
    core = FakeCore()
    async with living(core) as life:
        await life.ready()
        core.gate = asyncio.Event()
        running = asyncio.create_task(life.post({**TEXT, "stream": True}))
        await life.runs(1)
        core.dead = CoreDied("killed")
        core.gate.set()
        status, raw = await running
        assert status == 500
        assert json.loads(raw)["error"]["code"] == "engine_died"
        assert await asyncio.wait_for(life.task, 5) == run.EXIT_FAILED


@pytest.mark.parametrize(("error", "raised"), [(ModelError("no config.json"), run.CannotServe), (CoreDied("x"), None)])
async def test_a_model_that_cannot_be_loaded(error: Exception, raised: type[Exception] | None) -> None:
    core = FakeCore()
    core.load_error = error
    async with living(core) as life:
        if raised is not None:
            with pytest.raises(raised, match=r"no config\.json"):
                await asyncio.wait_for(life.task, 5)
        else:
            assert await asyncio.wait_for(life.task, 5) == run.EXIT_FAILED
        assert core.closed


async def test_a_port_in_use_is_said() -> None:
    async with living(FakeCore()) as life:
        await life.ready()
        with pytest.raises(run.CannotServe, match=f"cannot listen on 127.0.0.1:{life.settings.port}"):
            await run.serve(life.settings, FakeCore())


async def test_a_bad_token_file_is_said(tmp_path: Path) -> None:
    settings = make_settings(token_file=tmp_path / "absent")
    with pytest.raises(run.CannotServe, match="cannot read the token file"):
        await run.serve(settings, FakeCore())
