"""A router's /load as the rescaling law needs it: totals, latency, and what it knows of each worker. Pure.

Stricter than local mode's table: what decides about workers must not be guessed from half an answer.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from forebay_operator.observe.missed import MissedIn

Number = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]

MAX_WORKERS: Final = 4096
SERVING: Final = frozenset({"ready", "suspect"})
"""States in which a router may send to a worker. A suspect one is silent and not given up yet."""


class BadReport(ValueError):
    """It does not say what a router says; the text names the field."""


class ReportedLoad(msgspec.Struct, frozen=True):
    """Of forebay_wire.load.LoadReport, with the limits of a sane value."""

    engine_id: str = ""
    running: Number = 0
    waiting: Number = 0
    queued_prefill_tokens: Number = 0
    resident_decode_tokens: Number = 0
    decoding: Number = 0
    free_blocks: Number = 0
    total_blocks: Number = 0
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 16
    waiting_pulls: Number = 0
    held_blocks: Number = 0
    max_running: Number = 0
    prefill_tokens_total: Number = 0
    generated_tokens_total: Number = 0


class ReportedWorker(msgspec.Struct, frozen=True):
    name: str
    role: str | None = None
    state: str = ""
    age_seconds: Seconds | None = None
    load: ReportedLoad | None = None

    @property
    def serving(self) -> bool:
        return self.state in SERVING


class _Ended(msgspec.Struct, frozen=True):
    code: int
    count: Number


class _Totals(msgspec.Struct, frozen=True):
    offered_requests: Number
    offered_prompt_tokens: Number
    cached_prompt_tokens: Number
    generated_tokens: Number
    missed_ttft: Number
    missed_tpot: Number
    requests: list[_Ended]
    missed_in: Annotated[dict[str, Number], msgspec.Meta(max_length=64)] | None = None


class Totals(msgspec.Struct, frozen=True):
    """Counters since the router started."""

    offered_requests: int = 0
    offered_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    refused: int = 0
    """429, 5xx: what counts as missed without an answer."""

    missed_ttft: int = 0
    missed_tpot: int = 0
    missed_in: MissedIn | None = None
    """None: the router is too old to tell."""

    def plus(self, other: Totals) -> Totals:
        """Where only one of the two tells what misses lost their time to, the sum has that."""
        sums = [a + b for a, b in zip(_values(self), _values(other), strict=True)]
        missed_in = self.missed_in or other.missed_in
        if self.missed_in is not None and other.missed_in is not None:
            missed_in = self.missed_in.plus(other.missed_in)
        return _totals(sums, missed_in)

    def since(self, before: Totals) -> Totals | None:
        """What was counted after `before`; None when any counter went backwards."""
        differences = [a - b for a, b in zip(_values(self), _values(before), strict=True)]
        if min(differences) < 0:
            return None
        missed_in = None
        if self.missed_in is not None and before.missed_in is not None:
            missed_in = self.missed_in.since(before.missed_in)
            if missed_in is None:
                return None
        return _totals(differences, missed_in)


def _values(totals: Totals) -> tuple[int, ...]:
    """All but `missed_in`."""
    value: tuple[int, ...] = msgspec.structs.astuple(totals)
    return value[:-1]


def _totals(values: list[int], missed_in: MissedIn | None) -> Totals:
    return Totals(**dict(zip(Totals.__struct_fields__, values, strict=False)), missed_in=missed_in)


class _Report(msgspec.Struct, frozen=True):
    totals: _Totals
    workers: Annotated[list[ReportedWorker], msgspec.Meta(max_length=MAX_WORKERS)]
    instance: str = ""
    ttft_p95_ms: Seconds | None = None
    tpot_p95_ms: Seconds | None = None


class RouterReport(msgspec.Struct, frozen=True):
    totals: Totals
    workers: tuple[ReportedWorker, ...] = ()
    instance: str = ""
    """Fresh per router process; empty where the source can't tell (Prometheus)."""

    ttft_p95_seconds: float | None = None
    tpot_p95_seconds: float | None = None


_decoder = msgspec.json.Decoder(_Report)


def parse_report(raw: bytes) -> RouterReport:
    """Raises BadReport for anything that is not a router's /load with every figure in range."""
    try:
        report = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadReport(str(error)[:200]) from None
    totals = report.totals
    finished = refused = 0
    for ended in totals.requests:
        if ended.code < 400:
            finished += ended.count
        elif ended.code == 429 or ended.code >= 500:
            refused += ended.count
    return RouterReport(
        totals=Totals(
            offered_requests=totals.offered_requests,
            offered_tokens=totals.offered_prompt_tokens,
            cached_tokens=totals.cached_prompt_tokens,
            generated_tokens=totals.generated_tokens,
            finished=finished,
            refused=refused,
            missed_ttft=totals.missed_ttft,
            missed_tpot=totals.missed_tpot,
            missed_in=None if totals.missed_in is None else MissedIn.of(totals.missed_in),
        ),
        workers=tuple(report.workers),
        instance=report.instance,
        ttft_p95_seconds=None if report.ttft_p95_ms is None else report.ttft_p95_ms / 1e3,
        tpot_p95_seconds=None if report.tpot_p95_ms is None else report.tpot_p95_ms / 1e3,
    )
