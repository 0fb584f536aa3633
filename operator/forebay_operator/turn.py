"""What one reconcile is about to do, from what it gathered: counts, role targets, children, the plan. Pure.

`reconcile.py` carries it out; `forebay plan` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from forebay_operator.act.apply import Owner
from forebay_operator.act.operation import Operation
from forebay_operator.act.plan import Plan, plan
from forebay_operator.act.roles import Targets
from forebay_operator.api.labels import POOL, POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.children import children
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.goals import pool_counts, pool_goals, role_targets, rules
from forebay_operator.kube import Object
from forebay_operator.observe.gather import Gathered


@dataclass(frozen=True, slots=True)
class Turn:
    """One reconcile's fixed facts."""

    raw: Object
    owner: Owner
    model: DisaggregatedModel
    gathered: Gathered
    counts: Mapping[Pool, int]
    targets: Targets
    built: Sequence[Object]
    """Children, without the counts of the workers' Deployments."""

    plan: Plan

    @property
    def key(self) -> tuple[str, str]:
        return (self.owner.namespace, self.owner.name)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.raw.get("status") or {}

    @property
    def deployments(self) -> dict[Pool, str]:
        """Names of the workers' Deployments of the current revision."""
        return {pool: _worker_deployment(self.built, pool)["metadata"]["name"] for pool in POOLS}

    def children(self) -> list[Object]:
        """As they are to be applied: with the counts that the plan says."""
        wanted: list[Object] = []
        for child in self.built:
            count = self.plan.replicas.get(child["metadata"]["name"]) if child["kind"] == "Deployment" else None
            if count is not None:
                child = {**child, "spec": {"replicas": count, **child["spec"]}}
            wanted.append(child)
        return wanted


def take_turn(
    raw: Object,
    owner: Owner,
    model: DisaggregatedModel,
    gathered: Gathered,
    now: datetime,
    surroundings: Surroundings,
) -> Turn:
    status = raw.get("status") or {}
    built = children(model, uid=owner.uid, replicas=dict.fromkeys(POOLS), surroundings=surroundings)
    counts = pool_counts(model, status, gathered.observation)
    names: dict[Pool, str] = {pool: _worker_deployment(built, pool)["metadata"]["name"] for pool in POOLS}
    step = plan(
        gathered.observation,
        pool_goals(counts, names),
        Operation.from_status(status.get("operation")),
        gathered.loads.fenced,
        rules(model.spec),
        now,
    )
    return Turn(raw, owner, model, gathered, counts, role_targets(model.spec, status, counts), built, step)


def _worker_deployment(built: Sequence[Object], pool: Pool) -> Object:
    return next(
        child for child in built if child["kind"] == "Deployment" and child["metadata"]["labels"].get(POOL) == pool
    )
