"""Reads the router's /load. Fields that are missing or of another kind are unknown, never an error: a table must not
stop over a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay_operator.observe.load import in_range
from forebay_wire.load import LoadReport


@dataclass(frozen=True, slots=True)
class RouterLoad:
    workers: Mapping[str, LoadReport] = field(default_factory=dict)
    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    attainment: float | None = None
    in_flight: int | None = None


def parse_router_load(raw: bytes) -> RouterLoad:
    """A worker's report may lie in its entry itself or under `load`; `workers` may be a list or a map by name."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return RouterLoad()
    if not isinstance(body, dict):
        return RouterLoad()
    workers: dict[str, LoadReport] = {}
    for name, entry in _entries(body.get("workers")):
        nested = entry.get("load")
        report = parse_report(nested if isinstance(nested, dict) else entry)
        if report is not None:
            workers[name] = report
    in_flight = _number(body.get("in_flight"))
    return RouterLoad(
        workers=workers,
        ttft_p95_ms=_number(body.get("ttft_p95_ms")),
        tpot_p95_ms=_number(body.get("tpot_p95_ms")),
        attainment=_number(body.get("attainment")),
        in_flight=None if in_flight is None else int(in_flight),
    )


def parse_report(value: Any) -> LoadReport | None:
    """From decoded JSON, or from the text of the x-forebay-load header."""
    try:
        if isinstance(value, str):
            return in_range(msgspec.json.decode(value, type=LoadReport))
        return in_range(msgspec.convert(value, LoadReport))
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError):
        return None


def _entries(workers: Any) -> list[tuple[str, dict[str, Any]]]:
    if isinstance(workers, dict):
        return [(str(name), entry) for name, entry in workers.items() if isinstance(entry, dict)]
    if isinstance(workers, list):
        return [(str(e["name"]), e) for e in workers if isinstance(e, dict) and "name" in e]
    return []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
