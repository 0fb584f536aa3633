"""A cluster that obeys plans: Deployments, a ReplicaSet's order of deletion, workers that finish what they run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from forebay_operator.act.growth import PoolGoal, Rules
from forebay_operator.act.operation import Operation
from forebay_operator.act.plan import Plan, plan
from forebay_operator.api.labels import Pool
from forebay_operator.observe.types import DeploymentView, Observation, PodView
from forebay_wire.load import LoadReport

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = Rules(timedelta(seconds=600))


def report(running: int = 0, held: int = 0) -> LoadReport:
    return LoadReport("e", 1, running=running, held_blocks=held)


@dataclass
class World:
    """Deployments with a ReplicaSet's deletion order, and workers that finish what they run."""

    replicas: dict[str, int] = field(default_factory=dict)
    pods: list[PodView] = field(default_factory=list)
    fenced: set[str] = field(default_factory=set)
    now: datetime = NOW
    count: int = 0
    deleted: list[PodView] = field(default_factory=list)
    linger: int = 0
    """Looks of the controllers for which a deleted pod is still there, terminating."""

    _left: dict[str, int] = field(default_factory=dict)

    def observe(self) -> Observation:
        views = [
            DeploymentView(name, self.pool(name), name.split("-")[1], count, generation=1, observed_generation=1)
            for name, count in sorted(self.replicas.items())
        ]
        return Observation(1, tuple(self.pods), tuple(views))

    @staticmethod
    def pool(name: str) -> Pool:
        return "prefill" if name.startswith("prefill") else "decode"

    def control(self, ready: bool = True) -> None:
        """The controllers: pods as replicas say; NotReady ones go first, then the youngest."""
        self._left = {name: looks - 1 for name, looks in self._left.items()}
        self.pods = [p for p in self.pods if not p.terminating or self._left[p.name] > 0]
        for name, count in self.replicas.items():
            revision = name.split("-")[1]
            mine = [p for p in self.pods if p.pool == self.pool(name) and p.revision == revision and not p.terminating]
            for pod in sorted(mine, key=lambda p: (p.ready, -p.created_unix))[: max(0, len(mine) - count)]:
                self.pods.remove(pod)
                self.deleted.append(pod)
                if self.linger:
                    self.pods.append(replace(pod, terminating=True, ready=False))
                    self._left[pod.name] = self.linger
            for _ in range(count - len(mine)):
                self.count += 1
                self.pods.append(
                    PodView(f"{name}-{self.count}", self.pool(name), revision, f"uid-{self.count}", ready=ready,
                            created_unix=float(self.count), load=report(), load_age_seconds=0.1)
                )  # fmt: skip
        self.pods = [
            p if p.ready or p.draining or p.terminating else replace(p, ready=ready, node="n") for p in self.pods
        ]

    def change(self, name: str, **values: object) -> None:
        self.pods = [replace(p, **values) if p.name == name else p for p in self.pods]  # type: ignore[arg-type]

    def act(self, step: Plan) -> None:
        self.replicas = dict(step.replicas)
        if step.fence:
            self.change(step.fence, draining=True)
            self.fenced.add(step.fence)
        if step.silence:
            self.change(step.silence, ready=False)
        for name in step.release:
            self.change(name, draining=False)


def goals(prefill: int, decode: int, revision: str = "r1") -> dict[Pool, PoolGoal]:
    return {"prefill": PoolGoal(prefill, f"prefill-{revision}"), "decode": PoolGoal(decode, f"decode-{revision}")}


def settle(
    world: World,
    wanted: dict[Pool, PoolGoal],
    rules: Rules = RULES,
    operation: Operation | None = None,
    steps: int = 200,
    forget: random.Random | None = None,
) -> Operation | None:
    """Step until nothing changes. With `forget` a restart falls between plan and act, or between act and record."""
    for _ in range(steps):
        step = plan(world.observe(), wanted, operation, frozenset(world.fenced), rules, world.now)
        if step.operation != operation:
            if forget is None or forget.random() < 0.7:
                operation = step.operation
            continue
        if forget is None or forget.random() < 0.7:
            world.act(step)
        world.control()
        world.now += timedelta(seconds=1)
        rests = plan(world.observe(), wanted, operation, frozenset(world.fenced), rules, world.now)
        if operation is None and rests == Plan(dict(world.replicas)):
            return operation
    raise AssertionError(f"not settled after {steps} steps: {world.replicas}, {operation}, {step.waiting}")


def running(replicas: dict[str, int]) -> World:
    world = World(dict(replicas))
    world.control()
    return world
