"""Observations of a model in good health and in trouble, and the status made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from forebay_operator.api.conditions import Type
from forebay_operator.api.crd import custom_resource_definition
from forebay_operator.api.labels import Pool
from forebay_operator.observe.types import (
    DeploymentView,
    LatencyView,
    NodeView,
    Observation,
    PodView,
    Problem,
    ProblemKind,
)
from forebay_operator.status.build import build_status
from forebay_wire.load import LoadReport
from support.manifests import make_model

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


NODES = (NodeView("n", {}, {"nvidia.com/gpu": 64}),)


CRD = custom_resource_definition()


STATUS_SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


def report(**values: Any) -> LoadReport:
    return LoadReport(engine_id="e", epoch=1, ready=True, **values)


def pod(pool: Pool, index: int = 0, **values: Any) -> PodView:
    created = NOW.timestamp() - 3600
    defaults: dict[str, Any] = {"ready": True, "node": "n", "load": report(), "role": pool, "created_unix": created}
    return PodView(**{"name": f"{pool}-{index}", "pool": pool, "revision": "r1", **defaults, **values})


def deployment(pool: Pool | None, replicas: int = 1, **values: Any) -> DeploymentView:
    name = f"{pool or 'router'}-{values.get('revision', 'r1')}"
    counts = dict.fromkeys(("ready", "updated", "pods"), replicas)
    defaults = {"revision": "r1", **counts, "generation": 1, "observed_generation": 1}
    return DeploymentView(**{"name": name, "pool": pool, "replicas": replicas, **defaults, **values})


DEPLOYMENTS = (deployment("prefill"), deployment("decode"), deployment(None, 2))


HEALTHY = Observation(
    generation=3,
    pods=(pod("prefill"), pod("decode")),
    deployments=DEPLOYMENTS,
    nodes=NODES,
    router_ready=2,
    latency=LatencyView(640, 31, 99),
)


def status_of(
    observation: Observation,
    changes: dict[str, Any] | None = None,
    *,
    previous: dict[str, Any] | None = None,
    now: datetime = NOW,
    targets: dict[Pool, int] | None = None,
    readable: bool = True,
) -> dict[str, Any]:
    return build_status(
        make_model(changes or {}) if readable else None,
        observation,
        name="assistant",
        namespace="llm",
        targets=targets or {"prefill": 1, "decode": 1},
        previous=previous or {},
        now=now,
    )


def condition(status: dict[str, Any], type_: Type) -> dict[str, Any]:
    (found,) = [c for c in status["conditions"] if c["type"] == type_]
    return dict(found)


def kstatus(generation: int, status: Mapping[str, Any]) -> str:
    """sigs.k8s.io/cli-utils, pkg/kstatus/status/generic.go: the first of the two in the list that is True decides."""
    if status.get("observedGeneration", generation) != generation:
        return "InProgress"
    for each in status.get("conditions", ()):
        if each["status"] == "True" and each["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if each["type"] == "Reconciling" else "Failed"
    ready = [each["status"] for each in status.get("conditions", ()) if each["type"] == "Ready"]
    return "Current" if ready in ([], ["True"]) else "InProgress"


def unready(*pools: Pool) -> Observation:
    pods = tuple(replace(p, ready=False) if p.pool in pools else p for p in HEALTHY.pods)
    return replace(HEALTHY, pods=pods)


def with_problem(kind: ProblemKind, observation: Observation = HEALTHY, pool: Pool | None = "decode") -> Observation:
    return replace(observation, problems=(Problem(kind, "Pod llm/x", "something is wrong", pool),))


def loads(*transports: str, **values: Any) -> Observation:
    pods = tuple(pod("decode", index, load=report(transport=name, **values)) for index, name in enumerate(transports))
    return replace(HEALTHY, pods=(pod("prefill"), *pods))


FRESH_POD = NOW.timestamp() - 10

NO_GPUS = (NodeView("n", {}),)
