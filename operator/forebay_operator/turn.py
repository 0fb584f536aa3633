"""What one reconcile is about to do, from what it gathered: counts, role targets, children, the plan. Pure.

`reconcile.py` carries it out; `forebay plan` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from forebay_operator.act.apply import Owner
from forebay_operator.act.growth import PoolGoal, Rules
from forebay_operator.act.operation import Operation
from forebay_operator.act.pending import UNDONE, Placed, undo_pending
from forebay_operator.act.plan import Plan, plan
from forebay_operator.act.roles import Targets
from forebay_operator.api.labels import POOL, POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.children import children
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.goals import homes_of, pool_counts, pool_goals, resized_targets, role_targets, rules
from forebay_operator.homes import Homes, pending_seconds
from forebay_operator.kube import Object
from forebay_operator.observe.gather import Gathered
from forebay_operator.observe.objects import revision_of
from forebay_operator.rescaler import learnt_starts


@dataclass(frozen=True, slots=True)
class Turn:
    """One reconcile's fixed facts."""

    raw: Object
    owner: Owner
    model: DisaggregatedModel
    gathered: Gathered
    counts: Mapping[Pool, int]
    """Workers of each home pool, as they are to be remembered."""

    placed: Placed
    targets: Targets
    built: Sequence[Object]
    """Children, without the counts of the workers' Deployments."""

    goals: Mapping[Pool, PoolGoal]
    rules: Rules
    recorded: Operation | None
    """From status: what was under way."""

    plan: Plan
    homes: Homes
    """The pools, for the law that may size them."""

    yielded: frozenset[str] = frozenset()
    """Deployments whose count is left to somebody else."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.owner.namespace, self.owner.name)

    @property
    def status(self) -> Mapping[str, Any]:
        return self.raw.get("status") or {}

    @property
    def limits(self) -> tuple[str, ...]:
        """Why there are fewer workers than there are to be."""
        return (*self.plan.limits, *(undone.describe(pool) for pool, undone in self.placed.undone.items()))

    @property
    def wanted(self) -> Mapping[str, str]:
        """Deployments of the spec, by name: the revision of each."""
        return {child["metadata"]["name"]: revision_of(child) for child in self.built if child["kind"] == "Deployment"}

    def children(self, replicas: Mapping[str, int] | None = None) -> list[Object]:
        """As they are to be applied: with the counts that the plan says, or with `replicas`."""
        counts = self.plan.replicas if replicas is None else replicas
        wanted: list[Object] = []
        for child in self.built:
            count = counts.get(child["metadata"]["name"]) if child["kind"] == "Deployment" else None
            if child["metadata"]["name"] in self.yielded:
                spec = {key: value for key, value in child["spec"].items() if key != "replicas"}
                child = {**child, "spec": spec}
            elif count is not None:
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
    yielded: frozenset[str] = frozenset(),
    waited: Mapping[str, float] | None = None,
) -> Turn:
    """`waited`: how long workers have been without a node, as undo_pending() has it."""
    status = raw.get("status") or {}
    built = children(model, uid=owner.uid, replicas=dict.fromkeys(POOLS), surroundings=surroundings)
    bounds = {pool: model.spec.bounds(pool) for pool in POOLS}
    remembered = (status.get("memory") or {}).get(UNDONE) or {}
    asked = pool_counts(model, status, gathered.observation)
    wait = pending_seconds(learnt_starts(status))
    names: dict[Pool, str] = {pool: _worker_deployment(built, pool)["metadata"]["name"] for pool in POOLS}
    left = [pool for pool in POOLS if names[pool] in yielded]
    theirs = left if model.spec.replicas is None else POOLS
    unsized = model.spec.scaling.mode != "Auto"
    placed = undo_pending(
        asked, bounds, gathered.observation, remembered, now, wait, given=theirs, ask_again=unsized, waited=waited
    )
    counts = placed.counts
    live: dict[Pool, int] = {
        pool: sum(d.replicas for d in gathered.observation.deployments if d.pool == pool) for pool in POOLS
    }
    given = {pool: live[pool] if pool in left else counts[pool] for pool in POOLS}
    goals = pool_goals(given, names)
    fitted = resized_targets(status, given)
    held = status if fitted is None else {pool: {"target": fitted[pool]} for pool in POOLS}
    recorded = Operation.from_status(status.get("operation"))
    allowed = rules(model.spec)
    return Turn(
        raw=raw,
        owner=owner,
        model=model,
        gathered=gathered,
        counts=counts,
        placed=placed,
        targets=role_targets(model.spec, held, given),
        built=built,
        goals=goals,
        rules=allowed,
        recorded=recorded,
        plan=plan(gathered.observation, goals, recorded, gathered.loads.fenced, allowed, now),
        yielded=yielded,
        homes=homes_of(model.spec, given, gathered.observation, yielded=left, held=placed.undone),
    )


def _worker_deployment(built: Sequence[Object], pool: Pool) -> Object:
    return next(
        child for child in built if child["kind"] == "Deployment" and child["metadata"]["labels"].get(POOL) == pool
    )
