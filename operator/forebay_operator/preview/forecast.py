"""What becomes of every worker until a model rests: the reconciler's own rules on a cluster that obeys at once. Pure.

A forecast takes the good case: new pods find a node and get ready, drained workers run empty. What it cannot know is
how long that takes, and where the scheduler puts a new pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from forebay_operator.act.growth import PoolGoal, Rules
from forebay_operator.act.operation import Operation
from forebay_operator.act.plan import Plan, plan
from forebay_operator.act.roles import Targets, role_changes
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.observe.types import DeploymentView, Observation, PodView
from forebay_wire.load import LoadReport

_IDLE = LoadReport("forecast", 1, ready=True, draining=True)


class Fate(StrEnum):
    KEPT = "Kept"
    ADDED = "Added"
    DRAINED = "Drained"
    """It finishes its requests, or hands them on, and leaves."""

    LEAVING = "Leaving"
    """It is being deleted already."""


@dataclass(frozen=True, slots=True)
class PodForecast:
    name: str
    """Empty for a pod that is yet to be made."""

    deployment: str
    pool: Pool
    fate: Fate
    node: str | None
    role: Pool | None
    """That it has now."""

    becomes: Pool | None
    """The role that it ends with; None for one that leaves."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    pods: tuple[PodForecast, ...]
    replicas: Mapping[str, int]
    """Of every worker Deployment in the end; one that is missing here is removed."""

    steps: tuple[str, ...]
    """In order, one line each."""

    waiting: str = ""
    """What would keep it from ever coming to rest, in the good case too."""


@dataclass(slots=True)
class _World:
    """A cluster whose controllers, kubelets and workers do at once what they are told."""

    observation: Observation
    made: int = 0

    def count(self, name: str, replicas: int, goals: Mapping[Pool, PoolGoal]) -> int:
        """Set a Deployment's count; the pods that this adds."""
        held = next((d for d in self.observation.deployments if d.name == name), None)
        if held is None:
            pool = next(pool for pool, goal in goals.items() if goal.deployment == name)
            held = DeploymentView(name, pool, name.rpartition("-")[2], 0)
        others = tuple(d for d in self.observation.deployments if d.name != name)
        self.observation = replace(
            self.observation, deployments=(*others, replace(held, replicas=replicas, updated=replicas, ready=replicas))
        )
        grown = max(0, replicas - len(self.of(held)))
        for _ in range(grown):
            self.made += 1
            assert held.pool is not None
            pod = PodView(f"+{self.made}", held.pool, held.revision, uid=f"+{self.made}", phase="Running", ready=True,
                          created_unix=1e10 + self.made)  # fmt: skip
            self.observation = replace(self.observation, pods=(*self.observation.pods, pod))
        return grown

    def of(self, deployment: DeploymentView) -> list[PodView]:
        return [
            p
            for p in self.observation.pods
            if p.pool == deployment.pool and p.revision == deployment.revision and not p.terminating
        ]

    def change(self, uid: str, **values: object) -> None:
        pods = tuple(replace(p, **values) if p.uid == uid else p for p in self.observation.pods)  # type: ignore[arg-type]
        self.observation = replace(self.observation, pods=pods)

    def take(self, uid: str) -> None:
        self.observation = replace(self.observation, pods=tuple(p for p in self.observation.pods if p.uid != uid))

    def remove(self, name: str) -> None:
        kept = tuple(d for d in self.observation.deployments if d.name != name)
        self.observation = replace(self.observation, deployments=kept)

    def settle(self) -> bool:
        """Let what is under way in the cluster itself end: leavers go, missing pods appear, all get ready."""
        before = self.observation
        staying = tuple(
            replace(p, load=_IDLE, load_age_seconds=0.0) if p.draining else replace(p, phase="Running", ready=True)
            for p in before.pods
            if not p.terminating
        )
        self.observation = replace(before, pods=staying)
        for deployment in before.deployments:
            if deployment.pool is not None:
                self.count(deployment.name, deployment.replicas, {})
        return self.observation != replace(before, deployments=self.observation.deployments)


def forecast(
    observation: Observation,
    goals: Mapping[Pool, PoolGoal],
    operation: Operation | None,
    targets: Targets,
    rules: Rules,
    now: datetime,
    *,
    switching: bool,
) -> Forecast:
    """`operation` is the recorded one. Ends at rest, or after more steps than any change can take."""
    # Without latency the rules do not ask whether routers know a worker: nobody asks routers here.
    world = _World(replace(observation, latency=None))
    steps: list[str] = []
    why: dict[str, str] = {}
    limit = 50 + 20 * (len(observation.pods) + sum(goal.replicas for goal in goals.values()))
    waiting = ""
    for _ in range(limit):
        fenced = frozenset(p.name for p in world.observation.pods if p.draining)
        step = plan(world.observation, goals, operation, fenced, rules, now)
        if step.operation != operation:
            operation = step.operation
            if operation is not None and operation.uid not in why:
                why[operation.uid] = operation.cause.value
                steps.append(f"drain {operation.pod} of {operation.deployment} ({operation.cause.value})")
            continue
        if _carry_out(world, step, goals, steps) or _switch(world, targets, switching):
            continue
        waiting = step.waiting
        if not world.settle():
            break
        now += timedelta(seconds=1)
    return Forecast(
        pods=_pods(observation, world.observation, why),
        replicas={d.name: d.replicas for d in world.observation.deployments if d.pool is not None},
        steps=tuple(steps),
        waiting=waiting,
    )


def _carry_out(world: _World, step: Plan, goals: Mapping[Pool, PoolGoal], steps: list[str]) -> bool:
    """Whether anything changed."""
    held = {d.name: d.replicas for d in world.observation.deployments}
    by_name = {p.name: p for p in world.observation.pods}
    changed = False
    if step.shrink is not None and step.operation is not None and held.get(step.shrink) != step.replicas[step.shrink]:
        world.take(step.operation.uid)
    for name, replicas in step.replicas.items():
        if held.get(name) == replicas:
            continue
        grown = world.count(name, replicas, goals)
        if grown:
            steps.append(f"add {grown} to {name}")
        changed = True
    if step.fence is not None:
        world.change(by_name[step.fence].uid, draining=True, load=_IDLE, load_age_seconds=0.0)
        changed = True
    if step.silence is not None and by_name[step.silence].ready:
        world.change(by_name[step.silence].uid, ready=False)
        changed = True
    for name in step.release:
        world.change(by_name[name].uid, draining=False)
        changed = True
    for name in step.remove:
        world.remove(name)
        steps.append(f"remove {name}")
        changed = True
    return changed


def _switch(world: _World, targets: Targets, switching: bool) -> bool:
    changes = role_changes(world.observation, targets, switching=switching)
    for change in changes:
        world.change(change.uid, role=change.role)
    return bool(changes)


def _pods(before: Observation, after: Observation, why: Mapping[str, str]) -> tuple[PodForecast, ...]:
    names = {(d.pool, d.revision): d.name for d in (*after.deployments, *before.deployments)}
    last = {p.uid: p for p in after.pods}
    found: list[PodForecast] = []
    for pod in before.pods:
        end = last.pop(pod.uid, None)
        fate = Fate.LEAVING if pod.terminating else Fate.KEPT if end is not None else Fate.DRAINED
        found.append(
            PodForecast(
                name=pod.name,
                deployment=names.get((pod.pool, pod.revision), ""),
                pool=pod.pool,
                fate=fate,
                node=pod.node,
                role=pod.role,
                becomes=end.role if end is not None and not pod.terminating else None,
                why=why.get(pod.uid, ""),
            )
        )
    for pod in last.values():
        found.append(
            PodForecast("", names[pod.pool, pod.revision], pod.pool, Fate.ADDED, None, None, pod.role or pod.pool)
        )
    order = {pool: index for index, pool in enumerate(POOLS)}
    return tuple(sorted(found, key=lambda p: (order[p.pool], p.name == "", p.name, p.deployment)))
