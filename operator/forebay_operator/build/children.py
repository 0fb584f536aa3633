"""All children of a model, in the order in which they are to be applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.disruption import pool_disruption_budget, router_disruption_budget
from forebay_operator.build.meta import owned
from forebay_operator.build.monitor import pod_monitor
from forebay_operator.build.network import router_network_policy, worker_network_policy
from forebay_operator.build.rbac import router_role, router_role_binding, router_service_account
from forebay_operator.build.router import router_deployment
from forebay_operator.build.service import router_service
from forebay_operator.build.surroundings import NOWHERE, Surroundings
from forebay_operator.build.worker import worker_deployment

OPTIONAL_KINDS = ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor")
"""Kinds of which a model may stop having one: what is left over is deleted."""


def children(
    model: DisaggregatedModel,
    *,
    uid: str,
    replicas: Mapping[Pool, int | None],
    surroundings: Surroundings = NOWHERE,
) -> tuple[dict[str, Any], ...]:
    """Every child but the token's Secret, whose value only the caller has (build/secret.py).

    Policies and identities come before the pods that need them. Worker Deployments are those of the current revision;
    older ones are the rollout's business. `replicas`: None leaves the count out, so that the live one stays.
    """
    built = (
        router_service_account(model),
        router_role(model),
        router_role_binding(model),
        worker_network_policy(model, surroundings),
        router_network_policy(model, surroundings),
        *(pool_disruption_budget(model, pool) for pool in POOLS),
        router_disruption_budget(model),
        *(worker_deployment(model, pool, replicas=replicas[pool], surroundings=surroundings) for pool in POOLS),
        router_deployment(model, surroundings=surroundings),
        router_service(model),
        pod_monitor(model, surroundings),
    )
    return tuple(owned(child, model, uid) for child in built if child is not None)
