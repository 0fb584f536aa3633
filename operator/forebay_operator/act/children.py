"""A model's children as they should be: applied one by one, what is refused noted, what is left over deleted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay_operator.act.actuator import Actuator
from forebay_operator.act.apply import Applier, ForeignObject, Owner, key_of, owned
from forebay_operator.act.truce import Truce, Writer, writers_of
from forebay_operator.api.labels import MODEL
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.children import OPTIONAL_KINDS
from forebay_operator.build.names import token_secret_name
from forebay_operator.events import Event, Recorder, Why
from forebay_operator.kube import CHILDREN, Forbidden, Invalid, Kube, NotFound, Object
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.types import Problem, ProblemKind

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a model."""

_REPLICAS: Final = ("spec", "replicas")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one pass wants of a model's children."""

    raw: Object
    owner: Owner
    model: DisaggregatedModel
    children: Sequence[Object]
    live: Mapping[str, Object]
    """The Deployments, as read."""

    shrink: str | None = None
    """The Deployment whose count is lowered now, by a decision made on what was read."""

    @property
    def key(self) -> Key:
        return (self.owner.namespace, self.owner.name)


class Children:
    def __init__(
        self,
        kube: Kube,
        applier: Applier,
        actuator: Actuator,
        recorder: Recorder,
        metrics: OperatorMetrics,
        *,
        pod_monitors: bool,
        clock: Callable[[], float],
    ) -> None:
        """`clock` in seconds; only differences count."""
        self._kube = kube
        self._applier = applier
        self._actuator = actuator
        self._recorder = recorder
        self._metrics = metrics
        self._pod_monitors = pod_monitors
        self._clock = clock
        self._names: dict[Key, set[str]] = {}
        self._pruned: dict[Key, frozenset[tuple[str, str]]] = {}
        self._truces: dict[Key, Truce] = {}
        self._counts: dict[Key, dict[str, int]] = {}
        """Replicas that were applied last, by Deployment."""

    def names(self, key: Key) -> set[str]:
        """Of the children of the last pass."""
        return self._names.get(key, set())

    def forget(self, key: Key) -> None:
        for held in (self._pruned, self._truces, self._counts):
            held.pop(key, None)
        names = self._names.pop(key, None)
        if names:
            self._applier.forget(key[0], names)

    # Other writers

    async def yielded(self, raw: Object, owner: Owner, live: Mapping[str, Object]) -> frozenset[str]:
        """Deployments whose count is left to somebody else who keeps writing it."""
        key, now = (owner.namespace, owner.name), self._clock()
        truce = self._truces.setdefault(key, Truce())
        truce.forget(about for about in truce.about() if about[0] == "Deployment" and about[1] not in live)
        applied = self._counts.get(key, {})
        found: set[str] = set()
        for name, deployment in live.items():
            about = ("Deployment", name, "replicas")
            count = deployment["spec"].get("replicas", 1)
            writers = writers_of(deployment, _REPLICAS) if applied.get(name) != count else ()
            if truce.seen(about, writers, now):
                who = ", ".join(writer.manager for writer in writers)
                note = f"Deployment {name}: spec.replicas was set to {count} by {who}; {_SCALE_THE_MODEL}"
                await self._recorder.record(raw, Event(Why.FOREIGN_WRITER, "Apply", note, warning=True))
            if truce.holds(about, now):
                found.add(name)
        return frozenset(found)

    def contested(self, key: Key) -> tuple[str, ...]:
        """What others keep writing, for people."""
        truce, now = self._truces.get(key), self._clock()
        return () if truce is None else tuple(_described(about, truce) for about in truce.held(now))

    def wake(self, key: Key) -> float | None:
        """Seconds until something that was left to another is tried again."""
        truce = self._truces.get(key)
        return None if truce is None else truce.left(self._clock())

    # Applying

    async def bring(self, wanted: Wanted) -> tuple[Problem, ...]:
        """Apply what differs; what was refused of it. Raises ApiError for what concerns them all."""
        problems: list[Problem] = []
        await self._attempt(problems, "Secret", self._actuator.ensure_token(wanted.model, wanted.owner, self._clock()))
        for deployment in wanted.live.values():
            self._applier.cache.seen(deployment)
        for child in wanted.children:
            if child["kind"] == "Deployment" and child["metadata"]["name"] not in wanted.live:
                # Whether a watch has told of its end or not.
                self._applier.cache.drop(key_of(owned(child, wanted.owner)))
        for child in wanted.children:
            await self._attempt(problems, child["kind"], self._apply(wanted, child), child)
        names = {child["metadata"]["name"] for child in wanted.children}
        counts = self._counts.get(wanted.key, {})
        # Deployments of older revisions come and go.
        kept = names | wanted.live.keys()
        self._counts[wanted.key] = {name: count for name, count in counts.items() if name in kept}
        self._names[wanted.key] = names | {token_secret_name(wanted.owner.name)}
        await self._prune(wanted)
        return tuple(problems)

    async def _apply(self, wanted: Wanted, child: Object) -> None:
        kind, name = child["kind"], child["metadata"]["name"]
        truce, now = self._truces.setdefault(wanted.key, Truce()), self._clock()
        about = (kind, name, "fields")
        if truce.holds(about, now) and self._applier.applied_before(child, wanted.owner):
            return
        locked = (
            wanted.live[name]["metadata"]["resourceVersion"] if name == wanted.shrink and name in wanted.live else None
        )
        applied = await self._applier.apply(child, wanted.owner, locked=locked)
        self._metrics.applied(kind, applied.result)
        if kind == "Deployment" and "replicas" in child["spec"]:
            self._counts.setdefault(wanted.key, {})[name] = child["spec"]["replicas"]
        if applied.taken_from:
            note = f"{kind} {name}: {', '.join(applied.taken_from)} was put back"
            await self._recorder.record(wanted.raw, Event(Why.FIELD_OWNERSHIP_TAKEN, "Apply", note, warning=True))
        # Everyone whose value was put back by one apply is one round, whatever each has written.
        truce.seen(about, tuple(Writer(taken.partition(":")[0], applied.version) for taken in applied.taken_from), now)

    async def _attempt(
        self, problems: list[Problem], kind: str, work: Awaitable[None], child: Object | None = None
    ) -> None:
        """Note a refusal that concerns one child, and go on with the others. Raises what concerns them all."""
        name = "" if child is None else child["metadata"]["name"]
        try:
            await work
        except ForeignObject as error:
            problems.append(Problem(ProblemKind.FOREIGN_OBJECT, error.object, error.remedy))
        except (Invalid, Forbidden) as error:
            problems.append(Problem(_refusal(error.message), f"{kind} {name}", error.message[:1000]))
            self._metrics.applied(kind, "refused")
        except NotFound as error:
            if kind not in OPTIONAL_KINDS:
                raise
            log.info("%s is not served by this cluster: %s", kind, error)

    async def _prune(self, wanted: Wanted) -> None:
        """Delete children of optional kinds that the spec asks for no more. Looked for when the spec's set changes."""
        names = frozenset(
            (child["kind"], child["metadata"]["name"]) for child in wanted.children if child["kind"] in OPTIONAL_KINDS
        )
        if self._pruned.get(wanted.key) == names:
            return
        for resource in CHILDREN:
            if resource.kind not in OPTIONAL_KINDS:
                continue
            if resource.kind == "PodMonitor" and not self._pod_monitors:
                continue
            selector = f"{MODEL}={wanted.owner.name}"
            for obj in await self._kube.list(resource, wanted.owner.namespace, selector=selector):
                if (obj["kind"], obj["metadata"]["name"]) not in names:
                    await self._applier.remove(obj, wanted.owner)
        self._pruned[wanted.key] = names


_SCALE_THE_MODEL: Final = (
    "its count is the model's: scale the DisaggregatedModel instead (spec.replicas, or its /scale)"
)


def _described(about: Any, truce: Truce) -> str:
    kind, name, what = about
    who = ", ".join(truce.managers(about))
    if what == "replicas":
        return (
            f"{kind} {name}: spec.replicas is written again and again by {who}, and left to it for a while; "
            f"{_SCALE_THE_MODEL}"
        )
    return (
        f"{kind} {name}: fields of it are written again and again by {who}, and left to it for a while; "
        "let it leave objects alone that carry app.kubernetes.io/managed-by: forebay"
    )


def _refusal(message: str) -> ProblemKind:
    if "exceeded quota" in message:
        return ProblemKind.QUOTA_EXCEEDED
    if "because it is being terminated" in message:
        return ProblemKind.NAMESPACE_GOING
    return ProblemKind.REJECTED
