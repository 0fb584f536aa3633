"""Observations from a Prometheus that scrapes routers and workers, by its HTTP API.

prometheus-api-client asks in a thread of this model's own, which ends with the answer or at the query's deadline: a
server that hangs holds up nothing but this model's next look.
TLS is verified. Token and certificates are asked for again and again, so that they may be changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from requests.packages.urllib3.util.retry import Retry

from forebay_operator.build.names import router_name
from forebay_operator.decide.types import Workers
from forebay_operator.observe.assemble import Assembler, Unanswered
from forebay_operator.observe.bounded_session import BoundedSession
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.prometheus_samples import (
    LOAD,
    ROUTER,
    VLLM_LOAD,
    Sample,
    ages,
    by_pod,
    pages,
    reported_workers,
    router_pods,
    router_report,
    samples,
    selector,
    worker_pods,
)
from forebay_operator.observe.router_report import BadReport, RouterReport, Totals
from forebay_operator.observe.traffic import Observation
from forebay_operator.observe.worker_counters import ENGINE, VLLM, Page
from forebay_wire import metrics as names

LOOK_SECONDS: Final = 5.0
"""Scrapes are 15 s apart or more: asking more often brings nothing."""

DEADLINE_SECONDS: Final = 10.0
SAME_SCRAPE_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 75.0
"""Four scrapes of 15 s and the query. Beyond it a source is stale."""

WORKER_METRICS: Final = (*LOAD, *VLLM_LOAD, *ENGINE, *VLLM, "vllm:cache_config_info")


@dataclass(frozen=True, slots=True)
class Asked:
    """Where and for whom to ask."""

    url: str
    namespace: str
    model: str
    block_size: int = 16
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each query beside the token."""


@dataclass(frozen=True, slots=True)
class Credentials:
    token: str = ""
    ca: bytes = b""
    """PEM certificates to trust instead of the usual ones."""


@dataclass(frozen=True, slots=True)
class _Answer:
    routers: dict[str, list[Sample]]
    workers: dict[str, list[Sample]]
    ages: dict[str, float]


class PrometheusSource:
    name = "Prometheus"

    def __init__(
        self,
        asked: Asked,
        clock: Callable[[], float],
        *,
        credentials: Callable[[], Awaitable[Credentials]],
        base: Totals | None = None,
        capacity: Capacity | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`credentials` are asked for before each look; ValueError says why there are none."""
        self._asked = asked
        self._clock = clock
        self._credentials = credentials
        self._monotonic = monotonic
        self._assembler = Assembler(
            totals_source="Prometheus",
            fits_source="Prometheus",
            patience=PATIENCE_SECONDS,
            base=base,
            capacity=capacity,
        )
        self._session = BoundedSession(DEADLINE_SECONDS)
        self._ca = b""
        self._ca_file = ""
        self._unaskable = ""
        """Why nothing can be asked at that URL."""

        try:
            self._connect = PrometheusConnect(
                url=asked.url.rstrip("/"), session=self._session, retry=Retry(total=0), timeout=DEADLINE_SECONDS
            )
        except ValueError as error:
            # The CRD's pattern lets through what only a parser refuses. What is before an @ may be a password.
            host = asked.url.rpartition("@")[2][:80]
            self._unaskable = (
                f"spec.scaling.metrics.url ends in {host!r}, no URL ({error}); write it as http://host:port"
            )
        self._next = 0.0
        self._query_running: asyncio.Future[_Answer] | None = None
        self._last: Observation | None = None
        self._asked_at = 0.0
        self._scraped_at = -1.0
        self._routers: tuple[str, ...] = ("of the model",)
        """Router pods that it knew at the last answer."""

    async def observe(self, fleet: Fleet) -> Observation:
        if self._unaskable:
            return self._observation(fleet, Unanswered(self._unaskable, unreachable=True))
        now, last = self._monotonic(), self._last
        if last is not None and now < self._next:
            return last
        self._next = now + LOOK_SECONDS
        answer = await self._ask()
        if isinstance(answer, _Answer) and answer.routers:
            # What it counts was true at the scrape, and nothing is new before the next one.
            age = max(answer.ages.get(pod, 0.0) for pod in answer.routers)
            scraped = self._asked_at - age
            if last is not None and abs(scraped - self._scraped_at) < SAME_SCRAPE_SECONDS and age <= PATIENCE_SECONDS:
                return last
            self._scraped_at = scraped if age <= PATIENCE_SECONDS else self._asked_at
        self._last = self._observation(fleet, answer)
        return self._last

    def workers(self) -> Workers | None:
        return self._assembler.workers()

    @property
    def capacity(self) -> Capacity:
        return self._assembler.capacity

    async def close(self) -> None:
        # A query that hangs in its thread ends at its own deadline, and no other follows it.
        self._session.close()
        self._forget_ca()

    async def _ask(self) -> _Answer | Unanswered:
        try:
            credentials = await self._credentials()
            if self._query_running is None or self._query_running.done():
                # Not while a thread asks: it may be about to read the file of certificates.
                self._trust(credentials)
                self._asked_at = self._clock()
                self._query_running = _in_own_thread(self._queries, f"Prometheus of {self._asked.model}")
                self._query_running.add_done_callback(_heard)
            # A thread can't be stopped. One that hangs is waited for again next time, so that there is never a second.
            done, _ = await asyncio.wait({self._query_running}, timeout=DEADLINE_SECONDS)
            if not done:
                return Unanswered(_silence(), unreachable=True)
            return self._query_running.result()
        except BadReport as error:
            return Unanswered(str(error), invalid=True)
        except PrometheusApiClientException as error:
            # Its status, and nothing of its body: status is read by more people than whatever answered here may be.
            return Unanswered(str(error).partition(" (")[0][:200], invalid=True, unreachable=True)
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            # requests' JSONDecodeError is a RequestException: HTML where JSON should be.
            invalid = isinstance(error, (KeyError, TypeError, requests.JSONDecodeError))
            return Unanswered(_why(error), invalid=invalid, unreachable=True)

    def _trust(self, credentials: Credentials) -> None:
        token = {"Authorization": f"Bearer {credentials.token}"} if credentials.token else {}
        self._connect.headers = {**self._asked.headers, **token}
        if credentials.ca != self._ca:
            self._forget_ca()
            self._ca = credentials.ca
            if self._ca:
                with tempfile.NamedTemporaryFile(prefix="forebay-ca-", delete=False) as file:
                    file.write(self._ca)
                self._ca_file = file.name
        self._session.verify = self._ca_file or True

    def _forget_ca(self) -> None:
        if self._ca_file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ca_file)
        self._ca, self._ca_file = b"", ""

    def _queries(self) -> _Answer:
        """In a thread."""
        asked = self._asked
        of_routers, of_workers = router_pods(asked.model), worker_pods(asked.model)
        routers = self._query(selector([*ROUTER], asked.namespace, of_routers))
        workers = self._query(selector(WORKER_METRICS, asked.namespace, of_workers))
        stamped = selector([names.ROUTER_OFFERED_REQUESTS], asked.namespace, of_routers)
        beaten = selector([names.ENGINE_RUNNING, "vllm:num_requests_running"], asked.namespace, of_workers)
        at = [(sample, float(entry["value"][0])) for query in (stamped, beaten) for sample, entry in self._at(query)]
        return _Answer(by_pod(samples(routers)), by_pod(samples(workers)), ages(at))

    def _at(self, query: str) -> list[tuple[Sample, Any]]:
        result = self._query(f"timestamp({query})")
        return list(zip(samples(result), result, strict=True))

    def _query(self, query: str) -> Any:
        return self._connect.custom_query(query, timeout=DEADLINE_SECONDS)

    def _observation(self, fleet: Fleet, answer: _Answer | Unanswered) -> Observation:
        if isinstance(answer, _Answer) and not answer.routers:
            series = f"{names.ROUTER_OFFERED_REQUESTS} of pods {router_name(self._asked.model)}-*"
            answer = Unanswered(f"it has no series {series}; let it scrape the PodMonitor")
        if isinstance(answer, Unanswered):
            known = Fleet(fleet.members, self._routers)
            return self._assembler.look(known, dict.fromkeys(self._routers, answer), {}, self._clock())
        self._routers = tuple(answer.routers)
        reports: dict[str, RouterReport | Unanswered] = {}
        seen = reported_workers(answer.workers, answer.ages, fleet, self._asked.block_size, _prompt(answer.routers))
        for pod, found in answer.routers.items():
            age = answer.ages.get(pod, 0.0)
            try:
                reports[pod] = router_report(found, seen)
            except BadReport as error:
                reports[pod] = Unanswered(str(error), invalid=True)
            if age > PATIENCE_SECONDS:
                reports[pod] = Unanswered(f"its last sample is {age:.0f} s old")
        whole: dict[str, Page | Unanswered] = dict(pages(answer.workers))
        return self._assembler.look(Fleet(fleet.members, self._routers), reports, whole, self._scraped_at)


def _silence() -> str:
    # The usual cause: packets to a port that a NetworkPolicy does not name are dropped without a word.
    return f"no answer within {DEADLINE_SECONDS:g} s; is its port in the chart's networkPolicy.extraEgress?"


def _why(error: Exception) -> str:
    """requests puts the query's whole URL before the cause."""
    text = str(error)
    if "timed out" in text:
        return _silence()
    return f"{type(error).__name__}: {text.rpartition('Caused by')[2].strip()[:160]}"


def _in_own_thread(ask: Callable[[], _Answer], name: str) -> asyncio.Future[_Answer]:
    """asyncio's own pool has few threads: a few servers that hang would keep all other models waiting."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Answer] = loop.create_future()

    def run() -> None:
        try:
            tell = partial(answer.set_result, ask())
        except Exception as error:
            tell = partial(answer.set_exception, error)
        # The loop may have ended meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    # A daemon: the operator ends without waiting for it.
    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def _heard(answer: asyncio.Future[_Answer]) -> None:
    """An answer that nobody waits for any more is no error of ours."""
    if not answer.cancelled():
        answer.exception()


def _prompt(routers: Mapping[str, list[Sample]]) -> float:
    """Mean tokens of the prompts so far."""
    sums = {names.ROUTER_OFFERED_PROMPT_TOKENS: 0.0, names.ROUTER_OFFERED_REQUESTS: 0.0}
    for found in routers.values():
        for labels, value in found:
            name = labels.get("__name__", "")
            if name in sums:
                sums[name] += value
    return sums[names.ROUTER_OFFERED_PROMPT_TOKENS] / max(1.0, sums[names.ROUTER_OFFERED_REQUESTS])
