"""One model, from what is to what should be: gather, plan, apply, status. It never asks what happened, only what is."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from forebay_operator.act.actuator import Actuator, all_of
from forebay_operator.act.apply import Applier, Owner
from forebay_operator.act.children import Children, Wanted
from forebay_operator.act.operation import Operation
from forebay_operator.act.pending import UNDONE, Waits
from forebay_operator.act.roles import RoleChange, Targets, role_changes
from forebay_operator.api.conditions import Type
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.load import SpecError, read_stored
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.decide import Split
from forebay_operator.events import Event, Recorder, Why, condition_events
from forebay_operator.goals import HOMES
from forebay_operator.kube import (
    MODELS,
    ApiError,
    Conflict,
    Gone,
    Kube,
    NotFound,
    Object,
    Throttled,
)
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.fleet import fleet_of
from forebay_operator.observe.gather import Gathered, Gatherer
from forebay_operator.observe.types import Observation, Problem, ProblemKind
from forebay_operator.queue import RetryAfter
from forebay_operator.rescaler import LAW, Rescaler, Word
from forebay_operator.status.fields import filled, unwanted
from forebay_operator.turn import Turn, take_turn

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a model."""

PROBLEM_SECONDS: Final = 30.0
"""A child that is refused is tried again after so long: what refused it is not watched."""

FIGURES_SECONDS: Final = 60.0
"""Latency and transport are the routers' word, which no watch brings: a model that has one is looked at this often."""


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
        clock: Callable[[], float] = time.monotonic,
        wrote: Callable[[Key, str], None] = lambda key, version: None,
        gone: Callable[[Key], None] = lambda key: None,
        rescaler: Rescaler | None = None,
    ) -> None:
        """`clock` is monotonic: a wall clock that is set makes no wait longer or shorter.
        `wrote` hears of each change of a model's status: the resourceVersion that its watch has to report soon.
        `gone` hears of models that are not there any more."""
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
        self._clock = clock
        self._wrote = wrote
        self._gone = gone
        self._rescaler = rescaler
        self._children = Children(
            kube,
            applier,
            actuator,
            recorder,
            metrics,
            pod_monitors=surroundings.pod_monitors,
            clock=lambda: wall().timestamp(),
        )
        self._uids: dict[Key, str] = {}
        self._waits: dict[Key, Waits] = {}
        self._unknown: dict[Key, tuple[str, ...]] = {}
        """Fields of a spec that this version does not know, as told last."""

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
            self._gone(key)
            self._forget(key)
            return None
        meta = raw["metadata"]
        if meta.get("deletionTimestamp"):
            # The children go by their ownerReferences, this operator up or not.
            if self._rescaler is not None:
                self._rescaler.forget(key)
            return None
        owner = Owner(name, namespace, meta["uid"])
        if self._uids.get(key, owner.uid) != owner.uid:
            # Deleted and made anew between two looks.
            self._forget(key)
        self._uids[key] = owner.uid
        gathered = await self._gatherer.gather(raw)
        now = self._wall()
        try:
            model, unknown = read_stored(raw)
        except SpecError as error:
            text = "; ".join(str(problem) for problem in error.problems)
            await self._refuse(raw, gathered, text, now)
            return self._spread(self._resync)
        self._note_unknown(key, unknown)
        yielded = await self._children.yielded(raw, owner, gathered.deployments)
        waited = self._waits.setdefault(key, Waits()).look(gathered.observation, self._clock())
        try:
            turn = take_turn(raw, owner, model, gathered, now, self._surroundings, yielded, waited)
        except Exception as error:
            # Else only the log would ever know why nothing comes of this model.
            log.exception("%s: taking its turn", key)
            text = f"nothing can be made of it ({type(error).__name__}); see the operator's log and report it"
            await self._refuse(raw, gathered, text, now)
            return PROBLEM_SECONDS
        await self._tell_undone(turn)
        word = self._hear_law(turn)
        if word is not None and word.move is not None:
            # The record first here too: a restart after the first label must not take it for a mistake.
            targets: dict[Pool, int] = {"prefill": word.move.prefill, "decode": word.move.decode}
            counts = _resized_counts(turn, word.homes)
            if not await self._write_status(replace(turn, targets=targets, counts=counts), now, word):
                return PROBLEM_SECONDS
            await self._tell_rescale(raw, turn.targets, word)
            return 0.0
        recorded = turn.status.get("operation")
        if (None if turn.plan.operation is None else turn.plan.operation.to_status()) != recorded:
            # The record first: a restart after the next write must find out what was under way.
            if not await self._write_status(turn, now, word):
                return PROBLEM_SECONDS
            await self._tell_operation(raw, Operation.from_status(recorded), turn.plan.operation)
            return 0.0
        problems = self._problems[key] = await self._act(turn)
        await self._write_status(turn, now, word)
        if turn.plan.again is not None:
            return turn.plan.again
        absent = any(problem.kind is ProblemKind.MISSING_OBJECT for problem in gathered.observation.problems)
        due = [
            PROBLEM_SECONDS if problems or absent else self._spread(self._resync),
            self._spread(FIGURES_SECONDS) if gathered.routers else None,
            turn.placed.wake,
            self._children.wake(key),
        ]
        return min(seconds for seconds in due if seconds is not None)

    def _note_unknown(self, key: Key, fields: tuple[str, ...]) -> None:
        if fields and fields != self._unknown.get(key):
            log.warning("%s: %s of a later version's CRD have no effect; upgrade the operator", key, ", ".join(fields))
        self._unknown[key] = fields

    def _hear_law(self, turn: Turn) -> Word | None:
        if self._rescaler is None:
            return None
        gathered = turn.gathered
        fleet = fleet_of(gathered.observation, gathered.routers, turn.targets)
        return self._rescaler.see(
            turn.key, turn.owner.uid, turn.model.spec, turn.status, fleet, turn.targets, turn.homes
        )

    async def _act(self, turn: Turn) -> tuple[Problem, ...]:
        """Everything the plan asks for; what was refused of it."""
        live, step = turn.gathered.deployments, turn.plan
        problems = await self._children.bring(
            Wanted(turn.raw, turn.owner, turn.model, turn.children(), live, shrink=step.shrink)
        )
        await self._move_older(turn)
        await self._set_roles(turn)
        pods = {pod.name: pod for pod in turn.gathered.observation.pods}
        namespace = turn.owner.namespace
        if step.fence is not None:
            await self._actuator.fence(namespace, pods[step.fence])
        if step.silence is not None:
            await self._actuator.silence(turn.owner, pods[step.silence])
        await all_of(*(self._actuator.release(turn.owner, pods[name]) for name in step.release))
        return problems

    async def _move_older(self, turn: Turn) -> None:
        """Counts of older revisions' Deployments, and the end of those that are empty."""
        live = turn.gathered.deployments
        current = self._children.names(turn.key)
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

    async def _write_status(self, turn: Turn, now: datetime, word: Word | None) -> bool:
        """False when it could not be brought to say what it should."""
        seen = turn.gathered.observation
        observation = replace(
            seen,
            problems=(*self._problems.get(turn.key, ()), *seen.problems),
            limits=turn.limits,
            wanted=turn.wanted,
            contested=self._children.contested(turn.key),
        )
        previous: Mapping[str, Any] = turn.status
        undone = {UNDONE: {pool: entry.to_status() for pool, entry in turn.placed.undone.items()}}
        memory = {key: value for key, value in (turn.status.get("memory") or {}).items() if key != UNDONE}
        memory |= {HOMES: dict(turn.counts), **(undone if turn.placed.undone else {})}
        if word is not None:
            observation = replace(observation, metrics=word.trouble)
            said = {"decision": word.decision, "decisions": word.decisions}
            previous = {**previous, **{key: value for key, value in said.items() if value}}
            if word.law:
                memory[LAW] = word.law
        status = self._build_status(
            turn.model,
            observation,
            name=turn.owner.name,
            namespace=turn.owner.namespace,
            targets=turn.targets,
            previous=previous,
            now=now,
        )
        status["memory"] = memory
        if turn.plan.operation is not None:
            status["operation"] = turn.plan.operation.to_status()
        for pool in POOLS:
            self._metrics.workers(turn.key, pool, turn.targets[pool], len(observation.in_role(pool)))
        return await self._put_status(turn.raw, status)

    async def _refuse(self, raw: Object, gathered: Gathered, text: str, now: datetime) -> None:
        """The spec can't be read: say so, change nothing. What runs goes on, and so does what was under way."""
        meta, previous = raw["metadata"], raw.get("status") or {}
        problem = Problem(ProblemKind.INVALID_SPEC, f"{raw['kind']} {meta['namespace']}/{meta['name']}", text[:1000])
        if self._rescaler is not None:
            # It goes on from its checkpoint in status once the spec can be read.
            self._rescaler.forget((meta["namespace"], meta["name"]))
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

    async def _put_status(self, raw: Object, status: dict[str, Any]) -> bool:
        """Write it when it says something new. Nothing in it moves by itself, so that this comes to rest.

        False when the server leaves it as it is: a field that is to go is another field manager's too.
        """
        previous, status = raw.get("status") or {}, filled(status)
        # Conditions of other managers are theirs: they stay where they are, and are no difference.
        ours = [c for c in previous.get("conditions") or [] if c["type"] in set(Type)]
        held = {**previous, "conditions": ours}
        if status == held:
            return True
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
            after = await self._kube.apply(MODELS, body, force=True, subresource="status")
        except NotFound:
            return True
        version = after["metadata"]["resourceVersion"]
        if version == meta["resourceVersion"]:
            # No watch will report it either.
            name, left = f"{meta['namespace']}/{meta['name']}", ", ".join(unwanted(held, status))
            if left:
                log.warning("%s: status can't be changed: who else owns %s in metadata.managedFields?", name, left)
            else:
                pruned = ", ".join(unwanted(status, held))
                log.warning("%s: status keeps no %s: is the CRD of an earlier version? Apply this one's", name, pruned)
            return False
        self._wrote((meta["namespace"], meta["name"]), version)
        for event in condition_events(previous, status):
            await self._recorder.record(raw, event)
        return True

    async def _tell_rescale(self, raw: Object, before: Mapping[Pool, int], word: Word) -> None:
        move, decision = word.move, word.decision or {}
        resized = "" if word.homes is None else f"pools have {word.homes} workers, "
        note = f"{resized}targets {before['prefill']}:{before['decode']} -> {move}: {decision.get('message', '')}"
        await self._recorder.record(raw, Event(Why.RESCALED, str(decision.get("reason", "Rescale")), note))

    async def _tell_operation(self, raw: Object, before: Operation | None, after: Operation | None) -> None:
        if before is not None and (after is None or after.uid != before.uid):
            note = f"worker {before.pod} of {before.deployment} left"
            await self._recorder.record(raw, Event(Why.WORKER_LEFT, before.cause, note))
        if after is not None and (before is None or after.uid != before.uid):
            self._metrics.operation_begun(after.cause)
            note = f"worker {after.pod} of {after.deployment} finishes its requests and leaves"
            await self._recorder.record(raw, Event(Why.WORKER_LEAVES, after.cause, note))

    async def _tell_undone(self, turn: Turn) -> None:
        for pool in turn.placed.fresh:
            note = turn.placed.undone[pool].describe(pool)
            await self._recorder.record(turn.raw, Event(Why.WORKER_UNDONE, "Place", note, warning=True))

    def _forget(self, key: Key) -> None:
        if self._rescaler is not None:
            self._rescaler.forget(key)
        self._metrics.forget(key, POOLS)
        self._problems.pop(key, None)
        self._unknown.pop(key, None)
        self._waits.pop(key, None)
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._actuator.forget(uid)
        self._children.forget(key)

    def _spread(self, seconds: float) -> float:
        """So that models do not all come at once for ever after a restart."""
        return seconds * self._rng.uniform(0.8, 1.2)


def _resized_counts(turn: Turn, homes: Split | None) -> Mapping[Pool, int]:
    """The counts to remember with new sizes. Of a pool that somebody else sizes, ours stays what it was."""
    if homes is None:
        return turn.counts
    before = turn.homes.wanted
    return {pool: turn.counts[pool] + getattr(homes, pool) - getattr(before, pool) for pool in POOLS}
