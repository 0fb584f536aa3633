"""Kubernetes objects -> the views of an Observation. Pure; objects of others are left out by owner, never by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from forebay_operator.api import labels
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.observe.types import DeploymentView, NodeView, PodView
from forebay_wire.load import LoadReport

Object = Mapping[str, Any]


def controller_uid(obj: Object) -> str | None:
    references = obj["metadata"].get("ownerReferences") or []
    return next((str(r["uid"]) for r in references if r.get("controller")), None)


def controlled_by(objects: Iterable[Object], owners: Iterable[str]) -> list[Object]:
    """Those of `objects` whose controller is one of `owners` (uids)."""
    uids = set(owners)
    return [obj for obj in objects if controller_uid(obj) in uids]


def unix_time(text: str | None) -> float:
    """Of metav1.Time; 0 for none, or one that is no time."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def pool_of(obj: Object) -> Pool | None:
    return _pool((obj["metadata"].get("labels") or {}).get(labels.POOL))


def _pool(text: str | None) -> Pool | None:
    return next((pool for pool in POOLS if pool == text), None)


def condition(obj: Object, kind: str) -> Mapping[str, Any]:
    """The condition of a type, or {}."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), {})


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def has_ended(pod: Object) -> bool:
    """Evicted, refused by its kubelet, or run to an end: the object stays, and no controller counts it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def pod_view(pod: Object, pool: Pool, load: LoadReport | None = None, age: float | None = None) -> PodView:
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    marks = meta.get("labels") or {}
    return PodView(
        name=meta["name"],
        pool=pool,
        revision=marks.get(labels.REVISION, ""),
        uid=meta.get("uid", ""),
        role=_pool(marks.get(labels.ROLE)),
        node=spec.get("nodeName"),
        ip=status.get("podIP"),
        phase=status.get("phase", "Pending"),
        ready=is_ready(pod),
        draining=labels.DRAINING in marks or (load is not None and load.draining),
        terminating=meta.get("deletionTimestamp") is not None,
        created_unix=unix_time(meta.get("creationTimestamp")),
        load=load,
        load_age_seconds=age,
    )


def revision_of(deployment: Object) -> str:
    """Of its pod template; empty where that names none."""
    template = ((deployment.get("spec") or {}).get("template") or {}).get("metadata") or {}
    return str((template.get("labels") or {}).get(labels.REVISION, ""))


def deployment_view(deployment: Object) -> DeploymentView:
    meta, spec, status = deployment["metadata"], deployment.get("spec") or {}, deployment.get("status") or {}
    return DeploymentView(
        name=meta["name"],
        pool=pool_of(deployment),
        revision=revision_of(deployment),
        replicas=spec.get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        pods=status.get("replicas", 0),
        terminating=status.get("terminatingReplicas") or 0,
        generation=meta.get("generation", 0),
        observed_generation=status.get("observedGeneration", 0),
    )


def node_view(node: Object) -> NodeView:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return NodeView(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        # Extended resources are whole and have a domain; cpu, memory and the like have none.
        allocatable={name: int(count) for name, count in allocatable.items() if "/" in name and str(count).isdigit()},
        ready=condition(node, "Ready").get("status") == "True",
        cordoned=bool((node.get("spec") or {}).get("unschedulable")),
    )
