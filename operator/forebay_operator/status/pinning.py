"""Whether the cluster has the nodes that a model asks for, told with numbers and before any pod is made. Pure.

It looks at node selectors and at what nodes can allocate. What other pods hold, taints and affinity are left to the
scheduler: a yes here may still end in a pending pod, a no is certain as long as the nodes stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forebay_operator.api.conditions import Reason
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.build.merge import merge
from forebay_operator.build.worker import CONTAINER
from forebay_operator.observe.types import NodeView


@dataclass(frozen=True, slots=True)
class Pinning:
    satisfied: bool | None
    """None: nodes are not readable."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What each worker of a pool asks of its node. Its podTemplate has the last word: a device that is claimed (DRA)
    takes the place of a limit, and is the scheduler's to judge."""

    selector: Mapping[str, str]
    resource: str
    count: int


def asked(spec: DisaggregatedModelSpec, pool: Pool) -> Asked:
    own, gpus = spec.pool(pool), spec.gpus_per_worker(pool)
    limits = {gpus.resource: str(gpus.count)} if gpus.count else {}
    container = {"name": CONTAINER, "resources": {"limits": limits}}
    built = {"spec": {"nodeSelector": dict(own.node_selector), "containers": [container]}}
    pod = _map(merge(built, own.pod_template or {}), "spec")
    containers = [c for c in pod.get("containers") or [] if c.get("name") == CONTAINER]
    count = str(_map(containers[0], "resources", "limits").get(gpus.resource, 0)) if containers else "0"
    selector = {str(key): str(value) for key, value in _map(pod, "nodeSelector").items()}
    return Asked(selector, gpus.resource, int(count) if count.isdecimal() else 0)


def _map(node: Any, *path: str) -> Mapping[str, Any]:
    """Empty where there is none: what a podTemplate says elsewhere is the API server's to refuse."""
    for step in path:
        node = node.get(step) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def check_pinning(spec: DisaggregatedModelSpec, nodes: Sequence[NodeView] | None) -> Pinning:
    """Room for the fewest workers that the spec allows. The first thing that is missing decides the reason."""
    if nodes is None:
        return Pinning(
            None,
            Reason.NODES_NOT_READABLE,
            "the operator may not read nodes; pods that fit nowhere stay Pending",
        )
    faults = [fault for pool in POOLS if (fault := _pool(spec, pool, nodes)) is not None]
    if not faults and (fault := _both(spec, nodes)) is not None:
        faults.append(fault)
    if faults:
        return Pinning(False, faults[0].reason, "; ".join(fault.message for fault in faults))
    return Pinning(True, Reason.NODES_MATCH, "; ".join(_found(spec, pool, nodes) for pool in POOLS))


def matching(spec: DisaggregatedModelSpec, pool: Pool, nodes: Iterable[NodeView]) -> list[NodeView]:
    """Nodes with all labels of the pool's nodeSelector."""
    wanted = asked(spec, pool).selector.items()
    return [node for node in nodes if wanted <= node.labels.items()]


def _pool(spec: DisaggregatedModelSpec, pool: Pool, nodes: Sequence[NodeView]) -> Pinning | None:
    found = matching(spec, pool, nodes)
    if not found:
        return Pinning(False, Reason.NO_MATCHING_NODE, f"{pool}: {_no_match(spec, pool, nodes)}")
    gpus, workers = asked(spec, pool), spec.bounds(pool).min_replicas
    if gpus.count == 0:
        return None
    room = sum(_allocatable(node, gpus.resource) // gpus.count for node in found)
    if room >= workers:
        return None
    return Pinning(
        False,
        Reason.TOO_FEW_GPUS,
        f"{pool}: {_workers(workers)} of {gpus.count} {gpus.resource} each must fit, and there is room for {room} "
        f"({sum(_allocatable(node, gpus.resource) for node in found)} allocatable on {_nodes(spec, pool, found)})",
    )


def _both(spec: DisaggregatedModelSpec, nodes: Sequence[NodeView]) -> Pinning | None:
    """Pools that share nodes and resource must fit together: needed, but not enough where a node's rest is cut up."""
    gpus = {pool: asked(spec, pool) for pool in POOLS}
    if any(each.count == 0 for each in gpus.values()) or gpus["prefill"].resource != gpus["decode"].resource:
        return None
    resource = gpus["prefill"].resource
    shared = {node.name: node for pool in POOLS for node in matching(spec, pool, nodes)}
    needed = sum(gpus[pool].count * spec.bounds(pool).min_replicas for pool in POOLS)
    there = sum(_allocatable(node, resource) for node in shared.values())
    if there >= needed:
        return None
    return Pinning(
        False,
        Reason.TOO_FEW_GPUS,
        f"both pools together need {needed} {resource}; the nodes they select have {there} allocatable",
    )


def _no_match(spec: DisaggregatedModelSpec, pool: Pool, nodes: Sequence[NodeView]) -> str:
    """Which label is to blame: one that no node has at all, or the combination."""
    for key, value in sorted(asked(spec, pool).selector.items()):
        values = sorted({node.labels[key] for node in nodes if key in node.labels})
        if not values:
            return f"none of {len(nodes)} nodes has the label {key}; label nodes or correct nodeSelector"
        if value not in values:
            shown = ", ".join(values[:3]) + (", ..." if len(values) > 3 else "")
            return f"none of {len(nodes)} nodes has {key}={value}; there are {shown}"
    if not nodes:
        return "the cluster has no nodes"
    return f"none of {len(nodes)} nodes has all {len(asked(spec, pool).selector)} labels of nodeSelector at once"


def _found(spec: DisaggregatedModelSpec, pool: Pool, nodes: Sequence[NodeView]) -> str:
    found, gpus = matching(spec, pool, nodes), asked(spec, pool)
    if gpus.count == 0:
        return f"{pool}: {_nodes(spec, pool, found)}"
    total = sum(_allocatable(node, gpus.resource) for node in found)
    return f"{pool}: {_nodes(spec, pool, found)} with {total} {gpus.resource}"


def _nodes(spec: DisaggregatedModelSpec, pool: Pool, found: Sequence[NodeView]) -> str:
    selector = ",".join(f"{key}={value}" for key, value in sorted(asked(spec, pool).selector.items()))
    many = f"{len(found)} node{'' if len(found) == 1 else 's'}"
    return f"{many} with {selector}" if selector else many


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _allocatable(node: NodeView, resource: str) -> int:
    return 0 if node.cordoned else node.allocatable.get(resource, 0)
