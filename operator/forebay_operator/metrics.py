"""What the operator counts, as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_operator.queue import Due

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Key = tuple[str, str]


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter("forebay_reconciles", "Reconciles ended.", ["result"], registry=self.registry)
        self._seconds = Histogram("forebay_reconcile_seconds", "One reconcile.", registry=self.registry,
                                  buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))  # fmt: skip
        self._applies = Counter("forebay_applies", "Children applied.", ["kind", "result"], registry=self.registry)
        self._requests = Counter("forebay_api_requests", "Requests to the API server (status 0: no answer).",
                                 ["verb", "group", "resource", "status"], registry=self.registry)  # fmt: skip
        self._leader = Gauge("forebay_leader", "1 while this process leads.", registry=self.registry)
        self._role_changes = Counter("forebay_role_changes", "Role labels set.", ["role"], registry=self.registry)
        self._operations = Counter("forebay_operations", "Workers made to leave, begun.", ["cause"],
                                   registry=self.registry)  # fmt: skip
        self._decisions = Counter("forebay_decisions", "What the rescaling law said at each look.",
                                  ["namespace", "model", "reason"], registry=self.registry)  # fmt: skip
        self._flaps = Counter("forebay_rescale_flaps", "Moves that took the one before back within two minutes.",
                              ["namespace", "model"], registry=self.registry)  # fmt: skip
        labels = ["namespace", "model", "role"]
        self._target = Gauge("forebay_workers_target", "Workers that should serve.", labels, registry=self.registry)
        self._serving = Gauge("forebay_workers_serving", "Workers that serve.", labels, registry=self.registry)

    def worked(self, seconds: float, result: str) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def applied(self, kind: str, result: str) -> None:
        self._applies.labels(kind, result).inc()

    def requested(self, verb: str, group: str, resource: str, status: int) -> None:
        self._requests.labels(verb, group, resource, str(status)).inc()

    def leading(self, leads: bool) -> None:
        self._leader.set(leads)

    def role_changed(self, role: str) -> None:
        self._role_changes.labels(role).inc()

    def operation_begun(self, cause: str) -> None:
        self._operations.labels(cause).inc()

    def decided(self, key: Key, reason: str) -> None:
        self._decisions.labels(*key, reason).inc()

    def flapped(self, key: Key, count: int) -> None:
        self._flaps.labels(*key).inc(count)

    def workers(self, key: Key, role: str, target: int, serving: int) -> None:
        self._target.labels(*key, role).set(target)
        self._serving.labels(*key, role).set(serving)

    def forget(self, key: Key, roles: Iterable[str]) -> None:
        for role in roles:
            for gauge in (self._target, self._serving):
                # `remove` raises KeyError for labels that were never set.
                gauge.labels(*key, role)
                gauge.remove(*key, role)
        for counter in (self._decisions, self._flaps):
            counter.remove_by_labels({"namespace": key[0], "model": key[1]})

    def watch_queue(self, due: Due[Key], clock: Callable[[], float]) -> None:
        self.registry.register(_Queue(due, clock))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Queue(Collector):
    def __init__(self, due: Due[Key], clock: Callable[[], float]) -> None:
        self._due = due
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        yield GaugeMetricFamily("forebay_queue_depth", "Models due and not worked on.", value=self._due.waiting(now))
        yield GaugeMetricFamily("forebay_queue_age_seconds", "How long the oldest of them is due.",
                                value=self._due.oldest_age(now))  # fmt: skip
