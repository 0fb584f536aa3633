"""How many workers of the current revision a pool may have now: what is missing, what the GPUs allow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from forebay_operator.act.operation import Operation
from forebay_operator.api.labels import POOLS, Pool, other
from forebay_operator.observe.types import DeploymentView, Observation, PodView


@dataclass(frozen=True, slots=True)
class PoolGoal:
    replicas: int
    deployment: str
    """Of the current revision."""


@dataclass(frozen=True, slots=True)
class Rules:
    """From the spec."""

    drain: timedelta
    """Zero: nobody waits for running requests, they continue elsewhere."""

    max_unavailable: int = 1
    max_surge: int = 0
    gpus: Mapping[Pool, int] = field(default_factory=dict)
    """Of one worker of each pool; a pool that is left out needs none."""

    max_gpus: int | None = None
    """Of both pools together, those of leaving pods included."""

    one_resource: bool = False
    """Both pools take the same kind of GPU, so that a place which one leaves is one that the other can have."""


@dataclass(frozen=True, slots=True)
class Growth:
    replicas: int
    """Of the current revision's Deployment, at least as many as it has."""

    added: int = 0
    waiting: str = ""
    """Why it is fewer than are missing."""


def pods_of(observation: Observation, deployment: DeploymentView) -> list[PodView]:
    return [p for p in observation.pods if p.pool == deployment.pool and p.revision == deployment.revision]


def grow(
    observation: Observation,
    pool: Pool,
    goals: Mapping[Pool, PoolGoal],
    rules: Rules,
    replicas: Mapping[str, int],
    operation: Operation | None,
) -> Growth:
    """Add workers of the current revision: as many as are missing, and the surge while older ones are there.

    Counted by what the Deployments say now, not by what a plan lowers: on a full cluster a place must be free first.
    `replicas` is what the plan has come to so far, which counts for the GPUs.
    """
    goal = goals[pool]
    held = {d.name: d.replicas for d in observation.deployments if d.pool == pool}
    current = held.get(goal.deployment, 0)
    old = sum(held.values()) - current
    # Never more of the current revision than are wanted in the end.
    wanted = min(goal.replicas + min(_surge(pool, goals, rules), old) - old, goal.replicas)
    if wanted <= current:
        return Growth(current)
    if operation is not None and operation.grows == goal.deployment and wanted >= operation.grows_to:
        # The operation itself takes this step, once the place is free.
        wanted = max(current, operation.grows_to - 1)
    spare = _spare(observation, other(pool), goals)
    if rules.one_resource and spare:
        # Those are moved one by one, each as an operation of its own.
        wanted = max(current, wanted - spare)
    return _within_gpus(observation, pool, goals, current, wanted, rules, replicas)


def _surge(pool: Pool, goals: Mapping[Pool, PoolGoal], rules: Rules) -> int:
    """By what the budget leaves over: a surge must not take the place that the other pool's next worker needs."""
    each = rules.gpus.get(pool, 0)
    if rules.max_gpus is None or each == 0:
        return rules.max_surge
    needed = sum(rules.gpus.get(which, 0) * held.replicas for which, held in goals.items())
    return min(rules.max_surge, max(0, rules.max_gpus - needed) // each)


def _spare(observation: Observation, pool: Pool, goals: Mapping[Pool, PoolGoal]) -> int:
    """Workers that a pool is to lose for good. In its rollout none: those that leave then are moved nowhere."""
    held = {d.name: d.replicas for d in observation.deployments if d.pool == pool}
    current = held.pop(goals[pool].deployment, 0)
    return 0 if any(held.values()) else max(0, current - goals[pool].replicas)


def _within_gpus(
    observation: Observation,
    pool: Pool,
    goals: Mapping[Pool, PoolGoal],
    current: int,
    wanted: int,
    rules: Rules,
    replicas: Mapping[str, int],
) -> Growth:
    each = rules.gpus.get(pool, 0)
    if rules.max_gpus is None or each == 0 or wanted <= current:
        return Growth(wanted, wanted - current)
    held = held_gpus(observation, goals, rules, replicas)
    room = max(0, rules.max_gpus - held) // each
    if current + room >= wanted:
        return Growth(wanted, wanted - current)
    leaving = sum(rules.gpus.get(p.pool, 0) for p in observation.pods if p.terminating)
    text = (
        f"for GPUs: {wanted - current} more {pool} workers need {each * (wanted - current)}, and {held} of "
        f"scaling.maxGPUs {rules.max_gpus} are held ({leaving} of them by leaving pods)"
    )
    return Growth(current + room, room, text)


def held_gpus(
    observation: Observation, goals: Mapping[Pool, PoolGoal], rules: Rules, replicas: Mapping[str, int]
) -> int:
    """GPUs that both pools hold or are about to: of every pod until it is gone, and of pods still to be made.

    A leaving pod counts beside its replacement: its GPUs are not free before it has ended.
    """
    workers: dict[Pool, int] = dict.fromkeys(POOLS, 0)
    known = {d.name for d in observation.deployments}
    for deployment in observation.deployments:
        if deployment.pool is None:
            continue
        staying = sum(not pod.terminating for pod in pods_of(observation, deployment))
        workers[deployment.pool] += max(staying, deployment.replicas, replicas.get(deployment.name, 0))
    for pool, goal in goals.items():
        if goal.deployment not in known:
            workers[pool] += replicas.get(goal.deployment, 0)
    for pod in observation.pods:
        workers[pod.pool] += pod.terminating
    return sum(rules.gpus.get(pool, 0) * count for pool, count in workers.items())
