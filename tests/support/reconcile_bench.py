"""A reconciler that can be restarted at will, on a fake cluster and a clock that tests turn."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from forebay_operator.act.actuator import Actuator
from forebay_operator.act.apply import Applier, ApplyCache
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.events import Recorder
from forebay_operator.kube import KubeClient
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.gather import Gatherer, Nodes
from forebay_operator.observe.load import Workers
from forebay_operator.queue import RetryAfter
from forebay_operator.reconcile import Reconciler
from forebay_operator.status.build import build_status
from support.fake_cluster import FakeCluster
from support.fake_kube import FakeApi, Object

KEY = ("llm", "assistant")


def reconciler(
    kube: KubeClient,
    workers: Workers,
    wall: Callable[[], datetime],
    surroundings: Surroundings,
    metrics: OperatorMetrics,
) -> Reconciler:
    """One that has just started: it knows nothing but what the API server holds."""
    applier = Applier(kube, ApplyCache())

    def seconds() -> float:
        return wall().timestamp()

    return Reconciler(
        kube,
        Gatherer(kube, workers, Nodes(kube, seconds), seconds),
        applier,
        Actuator(kube, applier, workers),
        Recorder(kube, "test", wall),
        build_status,
        metrics,
        surroundings=surroundings,
        resync=600.0,
        rng=random.Random(1),
        wall=wall,
        clock=seconds,
    )


@dataclass
class Bench:
    """An operator that can be restarted at will, on a cluster and a clock that tests turn."""

    api: FakeApi
    kube: KubeClient
    cluster: FakeCluster
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)
    on_failure: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        surroundings = Surroundings(operator_namespace="forebay")
        self.reconciler = reconciler(self.kube, self.cluster, lambda: self.now, surroundings, self.metrics)

    def put(self, obj: Object) -> None:
        held = self.api.find("disaggregatedmodels", "assistant")
        if held is not None:
            obj = {**copy.deepcopy(held), "spec": obj["spec"]}
        self.api.put(obj)

    async def once(self) -> float | None:
        wait = await self.reconciler.reconcile(KEY)
        self.now += timedelta(seconds=min(wait or 0.0, 5.0))
        return wait

    async def rest(self, passes: int = 400) -> None:
        """Reconcile until nothing is due soon and nothing that is watched has changed, as the queue does."""
        for _ in range(passes):
            version = self.api.last_version
            try:
                wait = await self.once()
            except RetryAfter:
                if self.on_failure is not None:
                    self.on_failure()
                self.now += timedelta(seconds=1)
                continue
            if (wait is None or wait > 20.0) and self.api.last_version == version:
                return
        raise AssertionError(f"no rest after {passes} passes: {[str(c) for c in self.api.writes()[-5:]]}")

    def live(self) -> Mapping[str, Any]:
        held = self.api.find("disaggregatedmodels", "assistant")
        assert held is not None
        status: Mapping[str, Any] = held["status"]
        return status

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.live()["conditions"] if c["type"] == kind)
        return found["status"], found["reason"]

    def state(self) -> dict[str, Any]:
        """What is left in the end, without names and numbers that differ from run to run."""
        pods = [p["metadata"]["labels"] for p in self.api.all("pods")]
        return {
            "children": sorted((p, n) for p, _, n in self.api.objects if p not in ("pods", "events", "nodes")),
            "replicas": {d["metadata"]["name"]: d["spec"]["replicas"] for d in self.api.all("deployments")},
            "pods": sorted(sorted(p.items()) for p in pods),
            "operation": (self.api.find("disaggregatedmodels", "assistant") or {}).get("status", {}).get("operation"),
        }

    def message(self, kind: str) -> str:
        return str(next(c for c in self.live()["conditions"] if c["type"] == kind)["message"])

    def reasons(self) -> list[str]:
        """Of the events there were, in order."""
        events = sorted(self.api.all("events"), key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [event["reason"] for event in events]

    def deployment(self, pool: str) -> Object:
        return next(d for d in self.api.all("deployments") if f"-{pool}-" in d["metadata"]["name"])
