"""Models share one HTTP client, and not each other's silence."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from forebay_operator.observe import endpoints
from forebay_operator.observe.fleet import Fleet
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
