"""The workers' load and the clients' latency, as the routers report them on GET /load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import aiohttp
import msgspec

from forebay_operator.api.fields import INT32_MAX
from forebay_operator.build.ports import HTTP
from forebay_operator.observe.types import LatencyView
from forebay_wire import headers, paths
from forebay_wire.load import LoadReport
from forebay_wire.messages import DrainRequest, DrainResponse
from forebay_wire.urls import host_port

log = logging.getLogger(__name__)

DEADLINE_SECONDS: Final = 1.0
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_ROUTERS: Final = 64
STATE_DRAINING: Final = "draining"
MOST: Final = 10**18
"""Of a figure: a worker that moves KV at 400 GB/s has moved so many bytes in a month."""

MOST_SECONDS: Final = 1e15
_MEASURED: Final = ("kv_bytes_received", "kv_seconds")
"""Told together or not at all: a rate is made of them."""

_FIGURES: Final = {
    figure.name: figure.default
    for figure in msgspec.structs.fields(LoadReport)
    if figure.type in (int, float) and not figure.required
}


def in_range(load: LoadReport) -> LoadReport:
    """Without the figures that can't be: they are as if it had not told them."""
    wrong = {name for name in _FIGURES if not 0 <= getattr(load, name) <= MOST}
    if not wrong.isdisjoint(_MEASURED):
        wrong.update(_MEASURED)
    return msgspec.structs.replace(load, **{name: _FIGURES[name] for name in wrong}) if wrong else load


def _known(value: float | None, most: float) -> float | None:
    return value if value is not None and 0 <= value <= most else None


class WorkerState(msgspec.Struct):
    name: str
    state: str = ""
    age_seconds: float | None = None
    load: LoadReport | None = None

    def __post_init__(self) -> None:
        self.age_seconds = _known(self.age_seconds, MOST_SECONDS)
        self.load = None if self.load is None else in_range(self.load)


class RouterReport(msgspec.Struct):
    """What of a router's /load is used here; what a newer router adds is skipped.

    A figure that can't be is unknown, here already: status has no place for it, and would not be written at all.
    """

    name: str = ""
    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    attainment: float | None = None
    requests: int = 0
    workers: list[WorkerState] = []

    def __post_init__(self) -> None:
        self.ttft_p95_ms = _known(self.ttft_p95_ms, INT32_MAX)
        self.tpot_p95_ms = _known(self.tpot_p95_ms, INT32_MAX)
        self.attainment = _known(self.attainment, 1.0)
        self.requests = self.requests if 0 <= self.requests <= MOST else 0


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    report: LoadReport
    age: float


@dataclass(frozen=True, slots=True)
class Loads:
    """Of one model, gathered from all of its routers."""

    workers: Mapping[str, WorkerSeen] = field(default_factory=dict)
    """By pod name: the freshest report that any router has."""

    fenced: frozenset[str] = frozenset()
    """Workers to which no router sends anything new: every ready router was asked and says so."""

    latency: LatencyView | None = None


def combine(reports: Sequence[RouterReport | None]) -> Loads:
    """`None` stands for a ready router that did not answer: it may still send to anybody."""
    answered = [report for report in reports if report is not None]
    seen: dict[str, WorkerSeen] = {}
    for report in answered:
        for worker in report.workers:
            if worker.load is None or worker.age_seconds is None:
                continue
            held = seen.get(worker.name)
            if held is None or worker.age_seconds < held.age:
                seen[worker.name] = WorkerSeen(worker.load, worker.age_seconds)
    if len(answered) == len(reports):
        open_at = {w.name for report in answered for w in report.workers if w.state != STATE_DRAINING}
        fenced = frozenset(w.name for report in answered for w in report.workers) - open_at
    else:
        fenced = frozenset()
    return Loads(seen, fenced, _latency(answered))


def _latency(reports: Sequence[RouterReport]) -> LatencyView | None:
    """The worst router's percentiles (percentiles can't be averaged), attainment weighted by requests."""
    if not reports:
        return None
    measured = [(r.attainment, r.requests) for r in reports if r.attainment is not None and r.requests]
    count = sum(requests for _, requests in measured)
    return LatencyView(
        time_to_first_token_p95_milliseconds=_most(r.ttft_p95_ms for r in reports),
        time_per_output_token_p95_milliseconds=_most(r.tpot_p95_ms for r in reports),
        attainment_percent=int(100 * sum(share * n for share, n in measured) / count) if count else None,
    )


def _most(values: Iterable[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(max(known)) if known else None


class Workers(Protocol):
    """How the operator talks to routers and workers."""

    async def loads(self, routers: Sequence[str]) -> Loads:
        """Ask the routers at these addresses. Never raises: who does not answer is not counted."""
        ...

    async def drain(self, address: str, token: str, draining: bool, *, move: bool = False) -> DrainResponse | None:
        """Make a worker refuse new requests and turn NotReady, or take that back. None: it did not answer.

        `move`: its running requests are broken off, and continue elsewhere.
        """
        ...


class HttpWorkers:
    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def loads(self, routers: Sequence[str]) -> Loads:
        asked = routers[:MAX_ROUTERS]
        reports: list[RouterReport | None] = list(await asyncio.gather(*(self._report(address) for address in asked)))
        return combine(reports + [None] * (len(routers) - len(asked)))

    async def _report(self, address: str) -> RouterReport | None:
        try:
            raw = await self._call("GET", address, paths.LOAD)
            return msgspec.json.decode(raw, type=RouterReport)
        except (OSError, aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.info("router %s does not report its load: %s", address, error or type(error).__name__)
            return None

    async def drain(self, address: str, token: str, draining: bool, *, move: bool = False) -> DrainResponse | None:
        body = msgspec.json.encode(DrainRequest(draining, move))
        try:
            raw = await self._call("POST", address, paths.DRAIN, token, body)
            return msgspec.json.decode(raw, type=DrainResponse)
        except (OSError, aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("worker %s does not answer %s: %s", address, paths.DRAIN, error or type(error).__name__)
            return None

    async def _call(self, method: str, address: str, path: str, token: str = "", body: bytes | None = None) -> bytes:
        if self._session is None:
            # At most MAX_ROUTERS a reconcile. One bound for all would let a model's silent routers keep others waiting.
            self._session = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))
        sent = {headers.AUTHORIZATION: f"Bearer {token}"} if token else {}
        if body is not None:
            sent["content-type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with self._session.request(
            method,
            f"http://{host_port(address, HTTP)}{path}",
            headers=sent,
            data=body,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            raw = await response.content.read(MAX_BYTES + 1)
            while len(raw) <= MAX_BYTES and not response.content.at_eof():
                raw += await response.content.read(MAX_BYTES + 1 - len(raw))
            if len(raw) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            return raw
