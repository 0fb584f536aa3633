"""Whatever a router reports of load and latency, status takes it: what can't be is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from forebay_operator.observe.load import HttpWorkers, Loads
from support.statuses import HEALTHY, pod, status_of

HUGE = 10**400


def router(load: dict[str, Any] | None = None, **figures: Any) -> dict[str, Any]:
    told = {"engine_id": "e", "epoch": 1, "transport": "TCP", "running": 3, **(load or {})}
    worker = {"name": "decode-0", "state": "ready", "age_seconds": 0.1, "load": told}
    return {"ttft_p95_ms": 640.4, "tpot_p95_ms": 31, "attainment": 0.5, "requests": 4, "workers": [worker], **figures}


async def asked(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> Loads:
    held = iter(answers)

    async def call(*_: Any, **__: Any) -> bytes:
        return next(held)

    workers = HttpWorkers()
    monkeypatch.setattr(workers, "_call", call)
    return await workers.loads([f"10.0.0.{i}" for i in range(len(answers))])


def written(loads: Loads) -> dict[str, Any]:
    seen = loads.workers["decode-0"]
    pods = (pod("prefill"), pod("decode", load=seen.report, load_age_seconds=seen.age))
    return status_of(replace(HEALTHY, pods=pods, latency=loads.latency))


LATENCY = {
    "timeToFirstTokenP95Milliseconds": 640,
    "timePerOutputTokenP95Milliseconds": 31,
    "attainmentPercent": 50,
}


@pytest.mark.parametrize(
    ("figures", "left_out"),
    [
        ({}, []),
        *[({"ttft_p95_ms": value}, ["timeToFirstTokenP95Milliseconds"]) for value in (1e10, -1, 1e308, -1e308)],
        *[({"tpot_p95_ms": value}, ["timePerOutputTokenP95Milliseconds"]) for value in (2**31, -0.5, 1e308)],
        *[({"attainment": value}, ["attainmentPercent"]) for value in (1.5, -0.5, 1e308)],
        *[({"requests": value}, ["attainmentPercent"]) for value in (-3, HUGE)],
    ],
)
async def test_latency_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], left_out: list[str]
) -> None:
    loads = await asked(monkeypatch, json.dumps(router(**figures)).encode())
    assert written(loads)["latency"] == {key: value for key, value in LATENCY.items() if key not in left_out}


async def test_one_routers_nonsense_does_not_hide_anothers_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests below 0 would make 100 % and none of it 200 % together."""
    nonsense = router(ttft_p95_ms=1e10, tpot_p95_ms=-1, attainment=0.0, requests=-2)
    loads = await asked(monkeypatch, *(json.dumps(body).encode() for body in (router(), nonsense)))
    assert written(loads)["latency"] == LATENCY


@pytest.mark.parametrize(
    ("moved", "seconds", "rate"),
    [
        (8_600_000_000, 0.2, "43.0"),
        (-5, 1.0, None),
        (9 * 10**29, 0.2, None),
        pytest.param(HUGE, 0.2, None, id="400 digits"),
        (10**18, 0.2, "5000000000.0"),
        (8_600_000_000, 1e308, None),
    ],
)
async def test_transfers_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, moved: int, seconds: float, rate: str | None
) -> None:
    load = {"kv_bytes_received": moved, "kv_seconds": seconds}
    loads = await asked(monkeypatch, json.dumps(router(load)).encode())
    told = {"inUse": "TCP"} | ({} if rate is None else {"measuredGigabytesPerSecond": rate})
    assert written(loads)["transport"] == told
    assert loads.workers["decode-0"].report.running == 3, "what else it reports counts"


@pytest.mark.parametrize("figure", ["running", "free_blocks", "resident_decode_tokens", "decode_step_seconds"])
@pytest.mark.parametrize("value", [-1, 10**30])
async def test_other_figures_that_cannot_be_are_as_if_not_told(
    monkeypatch: pytest.MonkeyPatch, figure: str, value: int
) -> None:
    loads = await asked(monkeypatch, json.dumps(router({figure: value})).encode())
    assert getattr(loads.workers["decode-0"].report, figure) == 0


@pytest.mark.parametrize("age", [-1.0, 1e300])
async def test_a_report_of_no_age_is_none(monkeypatch: pytest.MonkeyPatch, age: float) -> None:
    """Below 0 it would be the freshest there is."""
    body = router()
    body["workers"][0]["age_seconds"] = age
    assert not (await asked(monkeypatch, json.dumps(body).encode())).workers


async def test_nesting_without_an_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await asked(monkeypatch, b'{"new": ' + b"[" * 100_000) == Loads()
