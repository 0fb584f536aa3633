"""Models share one HTTP client, and not each other's silence. An address that is none is told of."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from forebay_operator.observe import endpoints
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.sources import Sources
from forebay_operator.observe.traffic import Health
from forebay_router.metrics import RouterMetrics
from support.fake_kube import FakeApi
from support.manifests import make_model

SILENT_MODELS = 2
ROUTERS = 64


async def test_many_silent_routers_keep_no_other_model_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "LOAD_DEADLINE_SECONDS", 30.0)
    ended = asyncio.Event()
    asked = 0
    loaded = {"name": "router", **RouterMetrics(1.0, 0.04).as_json(1.0), "workers": []}

    async def load(request: web.Request) -> web.Response:
        nonlocal asked
        if request.headers["Host"].startswith("localhost"):
            asked += 1
            await ended.wait()
        return web.json_response(loaded)

    app = web.Application()
    app.router.add_get("/load", load)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port = runner.addresses[0][1]
    sources = Sources(FakeApi().direct(), asyncio.get_running_loop().time)
    spec = make_model().spec
    try:
        silent = [await sources.make(("llm", f"silent{i}"), spec, None, None) for i in range(SILENT_MODELS)]
        looks = [asyncio.create_task(s.observe(Fleet((), (f"localhost:{port}",) * ROUTERS))) for s in silent]
        while asked < SILENT_MODELS * ROUTERS:
            assert not any(look.done() for look in looks), f"only {asked} connections were opened"
            await asyncio.sleep(0)
        other = await sources.make(("llm", "other"), spec, None, None)
        seen = await other.observe(Fleet((), (f"127.0.0.1:{port}",)))
        assert [s.health for s in seen.signals if s.name.startswith("router")] == [Health.FRESH]
        ended.set()
        await asyncio.gather(*looks)
    finally:
        await sources.close()
        await runner.cleanup()


@pytest.mark.parametrize("url", ["http://[", "http://me:hunter2@[", "https://[::1:9090/x", "http://\u2100.example"])
async def test_an_address_that_is_none_is_told_of(url: str) -> None:
    """The CRD's pattern takes it. What was counted and learnt before waits for a better one."""
    now = 100.0
    sources = Sources(FakeApi().direct(), lambda: now)
    spec = make_model({"scaling": {"metrics": {"source": "Prometheus", "url": url}}}).spec
    capacity = Capacity([5000.0])
    source = await sources.make(("llm", "assistant"), spec, Totals(finished=7), capacity)
    fleet = Fleet((Member("p0", "prefill"), Member("d0", "decode")), ("10.0.0.1:8000",))
    await source.observe(fleet)
    now += 20.0
    (told,) = [s for s in (await source.observe(fleet)).signals if s.needed]
    assert (told.health, told.source) == (Health.MISSING, "Prometheus")
    assert f"spec.scaling.metrics.url ends in {url.rpartition('@')[2]!r}" in told.note
    assert "hunter2" not in told.note
    assert (source.name, source.capacity, source.workers()) == ("Prometheus", capacity, None)
    await source.close()
    await sources.close()
