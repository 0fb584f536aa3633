"""What the repeats on a cluster judge by: the steps that a change shows, and streams counted by what became of them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from e2e.on_kubernetes.scene import UNHARMED, harm
from e2e.on_kubernetes.steps import step_of
from e2e.traffic import Traffic

from forebay_operator.act.operation import Cause, Operation
from forebay_operator.api import labels

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEAVING = Operation(Cause.SCALE_IN, "decode", "assistant-decode-1", 1, "d0", "uid-d0", NOW, NOW + timedelta(minutes=1))
RECORDED: dict[str, Any] = {"status": {"operation": LEAVING.to_status()}}


def pod(name: str, role: str | None = "decode", **marks: Any) -> dict[str, Any]:
    """Ready, unless `ready` says otherwise."""
    meta: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "labels": {labels.ROLE: role} if role else {}}
    if marks.get("fenced"):
        meta["labels"][labels.DRAINING] = "true"
    if marks.get("ending"):
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ready = "True" if marks.get("ready", True) else "False"
    return {"metadata": meta, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


@pytest.mark.parametrize(
    ("model", "pods", "step"),
    [
        ({}, [pod("p0", "prefill"), pod("d0"), pod("d1", None)], ("roles 1:1:1, 0 ending", "")),
        ({"status": {}}, [pod("p0", "prefill"), pod("d0", ending=True)], ("roles 1:0:0, 1 ending", "")),
        (RECORDED, [pod("d0"), pod("d1")], ("recorded", "uid-d0")),
        (RECORDED, [pod("d0", fenced=True)], ("fenced", "uid-d0")),
        (RECORDED, [pod("d0", fenced=True, ready=False)], ("silent", "uid-d0")),
        (RECORDED, [pod("d0", fenced=True, ready=False, ending=True)], ("ending", "uid-d0")),
        (RECORDED, [pod("d1")], ("gone", "uid-d0")),
    ],
)
def test_the_steps_of_a_change(model: dict[str, Any], pods: list[dict[str, Any]], step: tuple[str, str]) -> None:
    assert step_of(model, pods) == step


def answer(text: str, *, finish: str | None = "length", done: bool = True) -> str:
    chunk = json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})
    return f"data: {chunk}\n\n" + ("data: [DONE]\n\n" if done else "")


@pytest.mark.parametrize(
    ("disturbed", "counted"),
    [
        (answer("right"), {}),
        (answer("other"), {"wrong": 1}),
        (answer("right", done=False), {"lost": 1}),
        (answer("ri", finish=None), {"lost": 1}),
        (503, {"lost": 1}),
        (None, {"cut": 1}),
    ],
)
async def test_a_stream_is_counted_by_what_became_of_it(disturbed: str | int | None, counted: dict[str, int]) -> None:
    """The first stream after those that teach the right answers is disturbed, and only it."""
    asked = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        said = disturbed if asked == 3 else answer("right")
        if isinstance(said, int):
            return web.json_response({"error": {"message": "no"}}, status=said)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write((said or answer("ri", finish=None, done=False)).encode())
        if said is None:
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        async with aiohttp.ClientSession() as session:
            traffic = Traffic(f"http://127.0.0.1:{runner.addresses[0][1]}", "m", streams=2, kinds=1)
            await traffic.learn(session)
            before = traffic.report()
            traffic.rate = 200.0
            await traffic.start(session)
            async with asyncio.timeout(30):
                while traffic.count < 5:
                    await asyncio.sleep(0.005)
            await traffic.stop()
    finally:
        await runner.cleanup()
    after = traffic.report()
    seen = harm(before, after)
    told = seen.pop("told")
    assert seen == {name: counted.get(name, 0) for name in UNHARMED if name != "told"}
    assert bool(told) == bool(counted.keys() & {"lost", "wrong"})
    assert (after["open"], after["settled"]) == (0, after["opened"])
