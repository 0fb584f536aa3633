"""One model, from what is to what should be: gather, plan, apply, status. It never asks what happened, only what is."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from forebay_operator.act.actuator import Actuator, all_of
from forebay_operator.act.apply import Applier, ForeignObject, Owner
from forebay_operator.act.operation import Operation
from forebay_operator.act.roles import RoleChange, Targets, role_changes
from forebay_operator.api.labels import MODEL, POOLS, Pool
from forebay_operator.api.load import SpecError, from_server
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.children import OPTIONAL_KINDS
from forebay_operator.build.names import token_secret_name
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.events import Event, Recorder, Why, condition_events
from forebay_operator.goals import HOMES
from forebay_operator.kube import (
    CHILDREN,
    MODELS,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    Kube,
    NotFound,
    Object,
    Throttled,
)
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.gather import Gathered, Gatherer
from forebay_operator.observe.types import Observation, Problem, ProblemKind
from forebay_operator.queue import RetryAfter
from forebay_operator.turn import Turn, take_turn

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a model."""

PROBLEM_SECONDS: Final = 30.0
"""A child that is refused is tried again after so long: what refused it is not watched."""


class StatusBuilder(Protocol):
    """status/: pure."""

    def __call__(
        self,
        model: DisaggregatedModel | None,
        observation: Observation,
        *,
        name: str,
        namespace: str,
        targets: Targets,
        previous: Mapping[str, Any],
        now: datetime,
    ) -> dict[str, Any]:
        """The new status but `operation` and `memory`. `model` None: the spec could not be read (see the problems)."""
        ...


class Reconciler:
    def __init__(
        self,
        kube: Kube,
        gatherer: Gatherer,
        applier: Applier,
        actuator: Actuator,
        recorder: Recorder,
        status: StatusBuilder,
        metrics: OperatorMetrics,
        *,
        surroundings: Surroundings,
        resync: float,
        rng: random.Random,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        wrote: Callable[[Key], None] = lambda key: None,
    ) -> None:
        """`wrote` hears of each change of a model's status, which its watch has to report soon."""
        self._kube = kube
        self._gatherer = gatherer
        self._applier = applier
        self._actuator = actuator
        self._recorder = recorder
        self._build_status = status
        self._metrics = metrics
        self._surroundings = surroundings
        self._resync = resync
        self._rng = rng
        self._wall = wall
        self._wrote = wrote
        self._children: dict[Key, set[str]] = {}
        self._uids: dict[Key, str] = {}
        self._pruned: dict[Key, frozenset[tuple[str, str]]] = {}
        self._problems: dict[Key, tuple[Problem, ...]] = {}
        """Of the last pass that applied the children."""

    async def reconcile(self, key: Key) -> float | None:
        """One pass; the seconds until the next is due. Raises RetryAfter."""
        try:
            return await self._reconcile(key)
        except Throttled as error:
            raise RetryAfter(error.retry_after or 1.0, str(error)) from error
        except (Conflict, Gone) as error:
            # Somebody wrote between our read and our write: what they wrote is read next time.
            raise RetryAfter(0.0, str(error)) from error
        except ApiError as error:
            raise RetryAfter(error.retry_after or 0.0, str(error)) from error

    async def _reconcile(self, key: Key) -> float | None:
        namespace, name = key
        try:
            raw = await self._kube.get(MODELS, namespace, name)
        except NotFound:
            self._forget(key)
            return None
        meta = raw["metadata"]
        if meta.get("deletionTimestamp"):
            # The children go by their ownerReferences, this operator up or not.
            return None
        owner = Owner(name, namespace, meta["uid"])
        if self._uids.get(key, owner.uid) != owner.uid:
            # Deleted and made anew between two looks.
            self._forget(key)
        self._uids[key] = owner.uid
        gathered = await self._gatherer.gather(raw)
        now = self._wall()
        try:
            model = from_server(raw)
        except SpecError as error:
            text = "; ".join(str(problem) for problem in error.problems)
            problem = Problem(ProblemKind.INVALID_SPEC, f"{raw['kind']} {namespace}/{name}", text[:1000])
            await self._refuse(raw, gathered, problem, now)
            return self._next_resync()
        turn = take_turn(raw, owner, model, gathered, now, self._surroundings)
        recorded = turn.status.get("operation")
        if (None if turn.plan.operation is None else turn.plan.operation.to_status()) != recorded:
            # The record first: a restart after the next write must find out what was under way.
            await self._write_status(turn, now)
            await self._tell_operation(raw, Operation.from_status(recorded), turn.plan.operation)
            return 0.0
        problems = self._problems[key] = await self._act(turn)
        await self._write_status(turn, now)
        if turn.plan.again is not None:
            return turn.plan.again
        return PROBLEM_SECONDS if problems else self._next_resync()

    async def _act(self, turn: Turn) -> tuple[Problem, ...]:
        """Everything the plan asks for; what was refused of it."""
        problems = await self._apply_children(turn)
        await self._move_older(turn)
        await self._set_roles(turn)
        pods = {pod.name: pod for pod in turn.gathered.observation.pods}
        namespace, step = turn.owner.namespace, turn.plan
        if step.fence is not None:
            await self._actuator.fence(namespace, pods[step.fence])
        if step.silence is not None:
            await self._actuator.silence(turn.owner, pods[step.silence])
        await all_of(*(self._actuator.release(turn.owner, pods[name]) for name in step.release))
        return problems

    async def _apply_children(self, turn: Turn) -> tuple[Problem, ...]:
        problems: list[Problem] = []
        model, owner, step = turn.model, turn.owner, turn.plan
        await self._attempt(problems, "Secret", self._actuator.ensure_token(model, owner))
        wanted = turn.children()
        live = turn.gathered.deployments
        for deployment in live.values():
            self._applier.cache.seen(deployment)
        for child in wanted:
            name = child["metadata"]["name"]
            locked = live[name]["metadata"]["resourceVersion"] if name == step.shrink and name in live else None
            await self._attempt(problems, child["kind"], self._apply(turn, child, locked), child)
        self._children[turn.key] = {child["metadata"]["name"] for child in wanted} | {token_secret_name(owner.name)}
        await self._prune(turn.key, owner, wanted)
        return tuple(problems)

    async def _apply(self, turn: Turn, child: Object, locked: str | None) -> None:
        applied = await self._applier.apply(child, turn.owner, locked=locked)
        self._metrics.applied(child["kind"], applied.result)
        if applied.taken_from:
            note = f"{child['kind']} {child['metadata']['name']}: {', '.join(applied.taken_from)} was put back"
            await self._recorder.record(turn.raw, Event(Why.FIELD_OWNERSHIP_TAKEN, "Apply", note, warning=True))

    async def _attempt(
        self, problems: list[Problem], kind: str, work: Awaitable[None], child: Object | None = None
    ) -> None:
        """Note a refusal that concerns one child, and go on with the others. Raises what concerns them all."""
        try:
            await work
        except ForeignObject as error:
            problems.append(Problem(ProblemKind.FOREIGN_OBJECT, error.object, error.remedy))
        except (Invalid, Forbidden) as error:
            if "because it is being terminated" in error.message:
                # The namespace goes, and this model with it.
                raise
            name = "" if child is None else child["metadata"]["name"]
            quota = "exceeded quota" in error.message
            found = ProblemKind.QUOTA_EXCEEDED if quota else ProblemKind.REJECTED
            problems.append(Problem(found, f"{kind} {name}", error.message[:1000]))
            self._metrics.applied(kind, "refused")
        except NotFound as error:
            if kind not in OPTIONAL_KINDS:
                raise
            log.info("%s is not served by this cluster: %s", kind, error)

    async def _prune(self, key: Key, owner: Owner, wanted: Sequence[Object]) -> None:
        """Delete children of optional kinds that the spec asks for no more. Looked for when the spec's set changes."""
        names = frozenset(
            (child["kind"], child["metadata"]["name"]) for child in wanted if child["kind"] in OPTIONAL_KINDS
        )
        if self._pruned.get(key) == names:
            return
        for resource in CHILDREN:
            if resource.kind not in OPTIONAL_KINDS:
                continue
            if resource.kind == "PodMonitor" and not self._surroundings.pod_monitors:
                continue
            for obj in await self._kube.list(resource, owner.namespace, selector=f"{MODEL}={owner.name}"):
                if (obj["kind"], obj["metadata"]["name"]) not in names:
                    await self._applier.remove(obj, owner)
        self._pruned[key] = names

    async def _move_older(self, turn: Turn) -> None:
        """Counts of older revisions' Deployments, and the end of those that are empty."""
        live = turn.gathered.deployments
        current = self._children[turn.key]
        for name, count in turn.plan.replicas.items():
            if name in live and name not in current and live[name]["spec"].get("replicas", 1) != count:
                await self._actuator.scale(live[name], count)
        for name in turn.plan.remove:
            await self._applier.remove(live[name], turn.owner)

    async def _set_roles(self, turn: Turn) -> None:
        switching = turn.model.spec.scaling.role_switching == "Enabled"
        changes = role_changes(turn.gathered.observation, turn.targets, switching=switching)
        await all_of(*(self._set_role(turn, change) for change in changes))

    async def _set_role(self, turn: Turn, change: RoleChange) -> None:
        if await self._actuator.set_role(turn.owner.namespace, change):
            self._metrics.role_changed(change.role)
            if change.was is not None:
                note = f"worker {change.pod} serves as {change.role} instead of {change.was}"
                await self._recorder.record(turn.raw, Event(Why.ROLE_CHANGED, "SwitchRole", note))

    # Status

    async def _write_status(self, turn: Turn, now: datetime) -> None:
        seen = turn.gathered.observation
        observation = replace(seen, problems=(*self._problems.get(turn.key, ()), *seen.problems))
        status = self._build_status(
            turn.model,
            observation,
            name=turn.owner.name,
            namespace=turn.owner.namespace,
            targets=turn.targets,
            previous=turn.status,
            now=now,
        )
        memory = {**(turn.status.get("memory") or {}), HOMES: dict(turn.counts)}
        status["memory"] = memory
        if turn.plan.operation is not None:
            status["operation"] = turn.plan.operation.to_status()
        for pool in POOLS:
            self._metrics.workers(turn.key, pool, turn.targets[pool], len(observation.in_role(pool)))
        await self._put_status(turn.raw, status)

    async def _refuse(self, raw: Object, gathered: Gathered, problem: Problem, now: datetime) -> None:
        """The spec can't be read: say so, change nothing. What runs goes on, and so does what was under way."""
        meta, previous = raw["metadata"], raw.get("status") or {}
        observation = replace(gathered.observation, problems=(problem, *gathered.observation.problems))
        targets: dict[Pool, int] = {pool: int((previous.get(pool) or {}).get("target") or 0) for pool in POOLS}
        status = self._build_status(
            None,
            observation,
            name=meta["name"],
            namespace=meta["namespace"],
            targets=targets,
            previous=previous,
            now=now,
        )
        for kept in ("operation", "memory"):
            if kept in previous:
                status[kept] = previous[kept]
        await self._put_status(raw, status)

    async def _put_status(self, raw: Object, status: dict[str, Any]) -> None:
        """Write it when it says something new. Nothing in it moves by itself, so that this comes to rest."""
        previous = raw.get("status") or {}
        if status == previous:
            return
        meta = raw["metadata"]
        body: Object = {
            "apiVersion": raw["apiVersion"],
            "kind": raw["kind"],
            # The version that was read: what was decided on it must not overwrite what somebody wrote meanwhile.
            "metadata": {
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
                "resourceVersion": meta["resourceVersion"],
            },
            "status": status,
        }
        try:
            await self._kube.apply(MODELS, body, force=True, subresource="status")
        except NotFound:
            return
        self._wrote((meta["namespace"], meta["name"]))
        for event in condition_events(previous, status):
            await self._recorder.record(raw, event)

    async def _tell_operation(self, raw: Object, before: Operation | None, after: Operation | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            note = f"worker {before.pod} of {before.deployment} left"
            await self._recorder.record(raw, Event(Why.WORKER_LEFT, before.cause, note))
        if after is not None and (before is None or after.uid != before.uid):
            self._metrics.operation_begun(after.cause)
            note = f"worker {after.pod} of {after.deployment} finishes its requests and leaves"
            await self._recorder.record(raw, Event(Why.WORKER_LEAVES, after.cause, note))

    def _forget(self, key: Key) -> None:
        self._metrics.forget(key, POOLS)
        self._pruned.pop(key, None)
        self._problems.pop(key, None)
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._actuator.forget(uid)
        names = self._children.pop(key, None)
        if names:
            self._applier.cache.forget(key[0], names)

    def _next_resync(self) -> float:
        return self._resync * self._rng.uniform(0.8, 1.2)
