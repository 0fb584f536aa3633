"""From what is seen to the next step of each pool: how many replicas, who is to leave, what is left over. Pure.

A pool has one Deployment per revision. Their replicas are moved one worker at a time: the worker is fenced (no router
sends it anything new), runs empty, turns NotReady, and then its Deployment's count is lowered. The ReplicaSet then
takes exactly it, since NotReady pods go first. This makes scale-in, rollout and rollback the same few rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from forebay_operator.act.growth import PoolGoal, Rules, grow, held_gpus, pods_of
from forebay_operator.act.operation import Cause, Operation
from forebay_operator.api.labels import POOLS, Pool, other
from forebay_operator.observe.types import DeploymentView, Observation, PodView

STEP_SECONDS: Final = 0.5
"""Between two looks while something is under way."""

FRESH_SECONDS: Final = 2.0
"""A report older than this does not say that a worker is idle."""

STUCK_SECONDS: Final = 120.0
"""A pod that is not gone so long after its grace period, which is the drain's, has nobody to end it."""

SILENCE_SECONDS: Final = 15.0
"""After its deadline a worker that will not turn NotReady gets so long; then its deletion cost must do."""


@dataclass(frozen=True, slots=True)
class Plan:
    replicas: Mapping[str, int]
    """Of each worker Deployment that should be there, the current revisions' always among them."""

    operation: Operation | None = None
    """To be recorded. Where it differs from the recorded one, that is written before anything else is done."""

    shrink: str | None = None
    """The Deployment whose count the operation lowers now."""

    fence: str | None = None
    """Pod to mark as draining."""

    silence: str | None = None
    """Pod to tell to turn NotReady."""

    release: tuple[str, ...] = ()
    """Pods that are marked as draining for no reason any more."""

    remove: tuple[str, ...] = ()
    """Deployments of old revisions without any worker left."""

    again: float | None = None
    """Seconds until the next look is due, should nothing report itself."""

    waiting: str = ""
    """What is being waited for, for people."""

    limits: tuple[str, ...] = ()
    """Why pools have fewer workers than they should."""


@dataclass(slots=True)
class _Draft:
    replicas: dict[str, int]
    shrink: str | None = None
    fence: str | None = None
    silence: str | None = None
    waiting: str = ""
    busy: bool = False
    limits: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)


def plan(
    observation: Observation,
    goals: Mapping[Pool, PoolGoal],
    operation: Operation | None,
    fenced: frozenset[str],
    rules: Rules,
    now: datetime,
) -> Plan:
    """`operation` is the recorded one; `fenced` are the workers to which no router sends anything new."""
    held = {d.name: d.replicas for d in observation.deployments if d.pool is not None}
    draft = _Draft(dict(held))
    if operation is not None:
        operation = _advance(operation.until(now), observation, goals, rules, fenced, draft, now)
    for pool in POOLS:
        _grow(observation, pool, goals, rules, operation, draft)
    if operation is None:
        # One worker leaves at a time, of both pools together: a shrinking pool can lean on the other.
        for pool in POOLS:
            operation = operation or _begin(observation, pool, goals, rules, draft, now)
    current = {goal.deployment for goal in goals.values()}
    done = {d.pool for d in observation.deployments if d.name in current and observation.all_ready(d)}
    for view in observation.deployments:
        if view.pool is None or view.name in current or view.replicas or pods_of(observation, view):
            continue
        # Until then the rollout is not over, and this is what shows it (status/conditions.py).
        if view.pool in done:
            draft.remove.append(view.name)
            del draft.replicas[view.name]
    leaving = operation.uid if operation is not None else None
    marked = (p for p in observation.pods if p.draining and not p.terminating and p.uid != leaving)
    return Plan(
        replicas=draft.replicas,
        operation=operation,
        shrink=draft.shrink,
        fence=draft.fence,
        silence=draft.silence,
        release=tuple(pod.name for pod in marked),
        remove=tuple(draft.remove),
        again=STEP_SECONDS if operation is not None or draft.busy else None,
        waiting=draft.waiting,
        limits=tuple(draft.limits),
    )


def _advance(
    operation: Operation,
    observation: Observation,
    goals: Mapping[Pool, PoolGoal],
    rules: Rules,
    fenced: frozenset[str],
    draft: _Draft,
    now: datetime,
) -> Operation | None:
    """The next step of a recorded operation; None when it is over."""
    deployment = next((d for d in observation.deployments if d.name == operation.deployment), None)
    if deployment is None:
        return None
    pod = next((p for p in observation.pods if p.uid == operation.uid), None)
    gone = pod is None or pod.terminating
    if deployment.replicas <= operation.replicas:
        if operation.grows:
            # A pod that is leaving still holds its GPUs.
            free = not any(p.terminating for p in pods_of(observation, deployment))
            free = free and (pod is None or _survived(observation, deployment))
            return _hand_over(operation, observation, goals, rules, draft, now, free=free)
        if gone or _survived(observation, deployment):
            return None
        draft.waiting = f"for {operation.pod} to be taken"
        return operation
    if gone:
        if observation.all_ready(deployment):
            # Nobody looked for a while, and its replacement serves: the ReplicaSet would take one that is not drained.
            return None
        # It left by itself, and its replacement is younger and not ready: the count can follow at once.
        _shrink(operation, draft)
        return operation
    assert pod is not None
    if not _wanted(operation, observation, goals[operation.pool]):
        return None
    late = now >= operation.deadline
    if not pod.draining:
        draft.fence = pod.name
    elif pod.ready and not late and not _idle(pod, fenced):
        draft.waiting = f"for the requests on {pod.name} to end"
    elif pod.ready and now < operation.deadline + timedelta(seconds=SILENCE_SECONDS):
        draft.silence = pod.name
        draft.waiting = f"for {pod.name} to turn NotReady"
    else:
        _shrink(operation, draft)
    return operation


def _hand_over(
    operation: Operation,
    observation: Observation,
    goals: Mapping[Pool, PoolGoal],
    rules: Rules,
    draft: _Draft,
    now: datetime,
    *,
    free: bool,
) -> Operation | None:
    """The last step of a move: the other pool gets the place that was left."""
    gains = other(operation.pool)
    goal = goals[gains]
    current = next((d.replicas for d in observation.deployments if d.name == operation.grows), None)
    if goal.deployment != operation.grows or goal.replicas < operation.grows_to or current is None:
        # The spec has changed meanwhile: what it wants now begins anew.
        return None
    if current >= operation.grows_to:
        return None
    if not free and now >= operation.deadline + rules.drain + timedelta(seconds=STUCK_SECONDS):
        # Its node is gone, say. The pool grows as far as other GPUs allow, and nothing else waits any longer.
        return None
    if not free:
        draft.waiting = f"for the GPUs of {operation.pod} to be free"
        return operation
    needed = held_gpus(observation, goals, rules, draft.replicas) + rules.gpus.get(gains, 0)
    if rules.max_gpus is not None and needed > rules.max_gpus:
        # A worker there takes more GPUs than this one did: it waits for the next that leaves.
        return None
    draft.replicas[operation.grows] = operation.grows_to
    return operation


def _shrink(operation: Operation, draft: _Draft) -> None:
    draft.replicas[operation.deployment] = operation.replicas
    draft.shrink = operation.deployment


def _survived(observation: Observation, deployment: DeploymentView) -> bool:
    """The ReplicaSet took another pod (one that was pending or broken): there are as many as there should be."""
    staying = [pod for pod in pods_of(observation, deployment) if not pod.terminating]
    return deployment.observed_generation >= deployment.generation and len(staying) <= deployment.replicas


def _idle(pod: PodView, fenced: frozenset[str]) -> bool:
    """Nothing runs on it, nobody will pull KV from it, and nothing new comes."""
    load, age = pod.load, pod.load_age_seconds
    if pod.name not in fenced or load is None or age is None or age > FRESH_SECONDS:
        return False
    return not (load.running or load.waiting or load.held_blocks or load.waiting_pulls)


def _wanted(operation: Operation, observation: Observation, goal: PoolGoal) -> bool:
    """Whether the worker still has to leave. A spec may have changed meanwhile, also back to the worker's revision."""
    total = sum(d.replicas for d in observation.deployments if d.pool == operation.pool)
    return total > goal.replicas or operation.deployment != goal.deployment


def _grow(
    observation: Observation,
    pool: Pool,
    goals: Mapping[Pool, PoolGoal],
    rules: Rules,
    operation: Operation | None,
    draft: _Draft,
) -> None:
    growth = grow(observation, pool, goals, rules, draft.replicas, operation)
    name = goals[pool].deployment
    if growth.added:
        # Not below what an operation has come to: the last step of a move is to grow the other pool.
        draft.replicas[name] = max(draft.replicas.get(name, 0), growth.replicas)
    draft.replicas.setdefault(name, 0)
    if growth.waiting:
        draft.busy, draft.waiting = True, growth.waiting
        draft.limits.append(growth.waiting)


def _begin(
    observation: Observation, pool: Pool, goals: Mapping[Pool, PoolGoal], rules: Rules, draft: _Draft, now: datetime
) -> Operation | None:
    """The next worker that has to leave, or None when there is none or it is not its time."""
    goal = goals[pool]
    mine = [d for d in observation.deployments if d.pool == pool]
    if not any(d.name == goal.deployment for d in mine):
        # The current revision can't be made, or not yet: the running one keeps serving.
        return None
    total = sum(draft.replicas[d.name] for d in mine)
    leaving = [d for d in mine if d.name != goal.deployment and d.replicas > 0]
    cause = Cause.ROLLOUT
    if not leaving:
        if total <= goal.replicas:
            return None
        leaving, cause = [d for d in mine if d.name == goal.deployment], Cause.SCALE_IN
    candidates = [(d, pod) for d in leaving for pod in pods_of(observation, d) if not pod.terminating]
    if not candidates:
        draft.busy = True
        draft.waiting = f"for the {pool} pods of {leaving[0].name} to appear"
        return None
    # The last of its role leaves after one on loan to the other: until that is back, nobody would serve in it.
    deployment, pod = min(candidates, key=lambda c: (_last_of_role(observation, c[1]), *_reluctance(c[1])))
    serving = {each: _serving(observation, each) for each in POOLS}
    if pod.serving and serving[pool] - 1 < goals[pool].replicas - rules.max_unavailable:
        draft.busy = True
        draft.waiting = f"for {pool} workers to be ready: {serving[pool]} of {goals[pool].replicas} are"
        return None
    if pod.serving and cause is Cause.ROLLOUT:
        partner = other(pool)
        # At 1P:1D it is the other pool's worker that serves both phases meanwhile: it must be there.
        # Of those that it has so far: it may be this very worker's GPUs that it is waiting for.
        there = sum(d.replicas for d in observation.deployments if d.pool == partner)
        fewest = max(1, min(goals[partner].replicas, there) - 1)
        if serving[partner] < fewest:
            draft.busy = True
            draft.waiting = f"for {partner} workers to be ready: {serving[partner]} of {goals[partner].replicas} are"
            return None
    gains = _gains(observation, pool, goals, rules) if cause is Cause.SCALE_IN else None
    if gains is not None:
        others = (p for p in observation.pods if p.pool == other(pool) and p.node is not None and not p.terminating)
        if not all(p.ready or p.draining for p in others):
            # One at a time: else several would load their model while nobody serves in their place.
            draft.busy = True
            draft.waiting = f"for {other(pool)} workers to be ready before another is moved there"
            return None
    return Operation(
        cause=cause if gains is None else Cause.MOVE,
        grows="" if gains is None else gains.name,
        grows_to=0 if gains is None else gains.replicas + 1,
        pool=pool,
        deployment=deployment.name,
        replicas=deployment.replicas - 1,
        pod=pod.name,
        uid=pod.uid,
        started=now,
        deadline=now + rules.drain,
    )


def _gains(observation: Observation, pool: Pool, goals: Mapping[Pool, PoolGoal], rules: Rules) -> DeploymentView | None:
    """The other pool's Deployment, where it is to get the place that a worker of `pool` leaves."""
    goal = goals[other(pool)]
    views = [d for d in observation.deployments if d.pool == other(pool)]
    if not rules.one_resource or sum(d.replicas for d in views) >= goal.replicas:
        return None
    return next((d for d in views if d.name == goal.deployment), None)


def _serving(observation: Observation, pool: Pool) -> int:
    """Workers of a home pool that requests are sent to: routers know them too, where any router can be asked."""
    asked = observation.latency is not None
    return sum(p.serving and (p.load is not None or not asked) for p in observation.pods if p.pool == pool)


def _last_of_role(observation: Observation, pod: PodView) -> bool:
    others = (p for p in observation.in_role(pod.serves_as) if p.uid != pod.uid)
    return pod.serving and not any(others)


def _reluctance(pod: PodView) -> tuple[bool, int, int, float, str]:
    """Who does no work leaves first; of two alike the younger one, whose prefix cache is the smaller loss."""
    if pod.load is None:
        # Without a report it may have any amount of work.
        return (pod.serving, 1, 0, -pod.created_unix, pod.name)
    load = pod.load
    requests = load.running + load.waiting
    return (pod.serving, 0, requests * 10**9 + load.resident_decode_tokens + load.queued_prefill_tokens,
            -pod.created_unix, pod.name)  # fmt: skip
