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
from forebay_operator.act.plan import Plan, PoolGoal, Rules, plan
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

    goals: Mapping[Pool, PoolGoal]
    rules: Rules
    recorded: Operation | None
    """From status: what was under way."""

    plan: Plan

    @property
    def key(self) -> tuple[str, str]:
        return (self.owner.namespace, self.owner.name)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.raw.get("status") or {}

    def children(self, replicas: Mapping[str, int] | None = None) -> list[Object]:
        """As they are to be applied: with the counts that the plan says, or with `replicas`."""
        counts = self.plan.replicas if replicas is None else replicas
        wanted: list[Object] = []
        for child in self.built:
            count = counts.get(child["metadata"]["name"]) if child["kind"] == "Deployment" else None
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
    goals = pool_goals(counts, names)
    recorded = Operation.from_status(status.get("operation"))
    allowed = rules(model.spec)
    return Turn(
        raw=raw,
        owner=owner,
        model=model,
        gathered=gathered,
        counts=counts,
        targets=role_targets(model.spec, status, counts),
        built=built,
        goals=goals,
        rules=allowed,
        recorded=recorded,
        plan=plan(gathered.observation, goals, recorded, gathered.loads.fenced, allowed, now),
    )


def _worker_deployment(built: Sequence[Object], pool: Pool) -> Object:
    return next(
        child for child in built if child["kind"] == "Deployment" and child["metadata"]["labels"].get(POOL) == pool
    )
