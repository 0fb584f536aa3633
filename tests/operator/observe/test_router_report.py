"""A router's own /load parses; whatever else comes is refused with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.router_report import BadReport, Totals, parse_report
from forebay_router.metrics import RouterMetrics
from forebay_wire.load import LoadReport


def body(**changes: Any) -> dict[str, Any]:
    """As the router's app makes it."""
    counted = RouterMetrics(1.0, 0.04)
    for code, ttft, tpot in (
        (200, 0.5, 0.02),
        (200, 1.5, 0.02),
        (200, 0.5, 0.05),
        (429, None, None),
        (404, None, None),
    ):
        counted.offer(100)
        if counted.finished(0.0, "/v1/completions", code, ttft, tpot):
            counted.missed_in["decode"] += 1
    counted.generated_tokens = 70
    counted.cached_prompt_tokens = 60
    load = {"engine_id": "e", "epoch": 3, "running": 4, "free_blocks": 10, "total_blocks": 20}
    worker = {"name": "p0", "role": "prefill", "state": "ready", "age_seconds": 0.1, "load": load}
    return {"name": "router", **counted.as_json(1.0), "workers": [worker], **changes}


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_the_routers_own_totals() -> None:
    report = parse_report(raw(body()))
    assert report.totals == Totals(5, 500, 60, 70, finished=3, refused=1, missed_ttft=2, missed_tpot=1,
                                   missed_in=MissedIn(decode=3))  # fmt: skip
    assert report.instance
    assert report.ttft_p95_seconds == 1.5
    assert report.workers[0].load is not None
    assert report.workers[0].load.running == 4


@pytest.mark.parametrize(
    ("told", "known"),
    [
        (None, None),
        ({}, MissedIn()),
        ({"prefill": 3, "transfer": 4}, MissedIn(3, 4)),
        ({"prefill": 3, "of a newer router": 9}, MissedIn(3)),
    ],
)
def test_what_older_and_newer_routers_tell_of_misses(told: dict[str, int] | None, known: MissedIn | None) -> None:
    value = body()
    del value["totals"]["missed_in"]
    if told is not None:
        value["totals"]["missed_in"] = told
    assert parse_report(raw(value)).totals.missed_in == known


def test_every_figure_of_a_report_that_is_used_is_one_that_workers_send() -> None:
    from forebay_operator.observe.router_report import ReportedLoad

    assert set(ReportedLoad.__struct_fields__) <= set(LoadReport.__struct_fields__)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (b"<html>Bad Gateway</html>", "JSON"),
        (b"", "JSON|truncated"),
        (b"[]", "object"),
        (b"{}", "totals"),
        (raw(body()).replace(b'"offered_requests": 5', b'"offered_requests": NaN'), "JSON|invalid"),
        (raw(body()).replace(b'"offered_requests": 5', b'"offered_requests": -5'), "offered_requests"),
        (raw(body()).replace(b'"offered_requests": 5', b'"offered_requests": 1e99'), "offered_requests"),
        (
            raw(body()).replace(b'"offered_requests": 5', b'"offered_requests": 99999999999999999999999'),
            "offered_requests",
        ),
        (raw(body()).replace(b'"running": 4', b'"running": -4'), "running"),
        (raw(body()).replace(b'"running": 4', b'"running": "4"'), "running"),
        (raw(body()).replace(b'"decode": 3', b'"decode": -3'), "missed_in"),
        (raw(body()).replace(b'"decode": 3', b'"decode": NaN'), "JSON|invalid"),
        (raw(body()).replace(b'"decode": 3', b'"decode": 0.5'), "missed_in"),
        (raw(body()).replace(b'"decode": 3', b'"decode": null'), "missed_in"),
        (raw(body(workers={"p0": {}})), "workers"),
        (raw(body(ttft_p95_ms=-1.0)), "ttft_p95_ms"),
        (b'{"x": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_report_is_said(spoilt: bytes, said: str) -> None:
    with pytest.raises(BadReport, match=said):
        parse_report(spoilt)
