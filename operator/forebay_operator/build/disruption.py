"""PodDisruptionBudgets: what a node drain may take at once. They bind evictions only, never our own scale-in."""

from __future__ import annotations

from typing import Any

from forebay_operator.api import labels
from forebay_operator.api.labels import Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import child_name, router_name, selector


def pool_disruption_budget(model: DisaggregatedModel, pool: Pool) -> dict[str, Any]:
    """One worker of a home pool at a time, over all of its revisions.

    `maxUnavailable`, since `minAvailable` would block every drain of a pool of one.
    """
    name = model.metadata.name
    chosen = {**selector(name, "worker"), labels.POOL: pool}
    return _budget(metadata(model, child_name(name, pool), "worker", **{labels.POOL: pool}), chosen)


def router_disruption_budget(model: DisaggregatedModel) -> dict[str, Any] | None:
    """None with one router: a budget could only allow its eviction or block it for good."""
    if model.spec.router.replicas < 2:
        return None
    name = model.metadata.name
    return _budget(metadata(model, router_name(name), "router"), selector(name, "router"))


def _budget(meta: dict[str, Any], chosen: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta,
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": chosen},
            # A pod that never got ready must not hold up the drain of its node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
