"""Read the cluster, let the API server try the writes (dry runs), and tell what they would come to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from forebay_operator.act.apply import Applier, ApplyCache, ForeignObject, Owner, owned
from forebay_operator.api.labels import MODEL, POOLS, Pool
from forebay_operator.api.load import from_server
from forebay_operator.build.children import OPTIONAL_KINDS
from forebay_operator.build.names import token_secret_name
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.kube import CHILDREN, MODELS, SECRETS, Forbidden, Invalid, Kube, NotFound, Object, resource_of
from forebay_operator.observe.gather import Gatherer, Nodes
from forebay_operator.observe.load import Workers
from forebay_operator.observe.types import NodeView
from forebay_operator.preview.apply import as_applied
from forebay_operator.preview.changes import Action, ObjectChange, differences
from forebay_operator.preview.forecast import Fate, Forecast, forecast
from forebay_operator.status.pinning import matching
from forebay_operator.turn import Turn, take_turn

_NO_UID: Final = "00000000-0000-0000-0000-000000000000"
"""Of a model that is not there yet."""

_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Preview:
    namespace: str
    name: str
    model: ObjectChange
    """The DisaggregatedModel itself."""

    objects: tuple[ObjectChange, ...]
    """Its children."""

    forecast: Forecast
    places: Mapping[Pool, tuple[str, ...] | None]
    """Nodes whose labels let a pool's new pods in; None where nodes may not be read."""

    problems: tuple[str, ...]
    """What is wrong in the cluster already."""

    notes: tuple[str, ...]
    """What could not be looked at, and what was assumed instead."""

    @property
    def refused(self) -> bool:
        return any(change.action is Action.REFUSED for change in (self.model, *self.objects))

    @property
    def changes(self) -> bool:
        if any(change.action is not Action.KEEP for change in (self.model, *self.objects)):
            return True
        return any(pod.fate is not Fate.KEPT or pod.role != pod.becomes for pod in self.forecast.pods)


async def preview(
    kube: Kube, written: Object, workers: Workers, nodes: Nodes, surroundings: Surroundings, now: datetime
) -> Preview:
    """`written` is the model as in the file, with its namespace. Raises ApiError, SpecError."""
    namespace, name = written["metadata"]["namespace"], written["metadata"]["name"]
    try:
        live: Object | None = await kube.get(MODELS, namespace, name)
    except NotFound:
        live = None
    notes: list[str] = []
    raw = await as_applied(kube, written, live, notes)
    raw["metadata"].setdefault("uid", _NO_UID)
    owner = Owner(name, namespace, raw["metadata"]["uid"])
    model = from_server(raw)
    gathered = await Gatherer(kube, workers, nodes).gather(raw)
    turn = take_turn(raw, owner, model, gathered, now, surroundings)
    switching = model.spec.scaling.role_switching == "Enabled"
    end = forecast(gathered.observation, turn.goals, turn.recorded, turn.targets, turn.rules, now, switching=switching)
    if gathered.observation.pods and gathered.observation.latency is None:
        notes.append("the routers' load could not be read: which of several equal workers leaves may differ")
    return Preview(
        namespace=namespace,
        name=name,
        model=_of_model(live, raw),
        objects=tuple(await _Children(kube, turn, end, notes).changes()),
        forecast=end,
        places={pool: _places(turn, pool, gathered.observation.nodes) for pool in POOLS},
        problems=(*(f"{p.object}: {p.message}" for p in gathered.observation.problems), *turn.limits),
        notes=tuple(notes),
    )


def _of_model(live: Object | None, raw: Object) -> ObjectChange:
    name = raw["metadata"]["name"]
    if live is None:
        return ObjectChange(Action.CREATE, MODELS.kind, name)
    fields = differences({"spec": live.get("spec")}, {"spec": raw["spec"]})
    return ObjectChange(Action.CHANGE if fields else Action.KEEP, MODELS.kind, name, fields)


def _places(turn: Turn, pool: Pool, nodes: Sequence[NodeView] | None) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    return tuple(node.name for node in matching(turn.model.spec, pool, nodes) if not node.cordoned and node.ready)


class _Children:
    def __init__(self, kube: Kube, turn: Turn, end: Forecast, notes: list[str]) -> None:
        self._kube = kube
        self._turn = turn
        self._end = end
        self._notes = notes
        self._applier = Applier(kube, ApplyCache())
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def changes(self) -> list[ObjectChange]:
        wanted = self._turn.children(self._end.replicas)
        found: list[ObjectChange] = [await self._token()]
        found += await asyncio.gather(*(self._one(child) for child in wanted))
        for name in self._turn.gathered.deployments:
            view = next(d for d in self._turn.gathered.observation.deployments if d.name == name)
            if view.pool is not None and name not in self._end.replicas:
                found.append(ObjectChange(Action.DELETE, "Deployment", name, note="its last worker has left"))
            elif view.pool is not None and all(child["metadata"]["name"] != name for child in wanted):
                found.append(self._older(name, view.replicas))
        found += await self._left_over(wanted)
        return sorted(found, key=lambda change: (change.kind, change.name))

    def _older(self, name: str, replicas: int) -> ObjectChange:
        """Of an earlier revision, and not about to go."""
        end = self._end.replicas[name]
        fields = () if end == replicas else (f"spec.replicas: {replicas} -> {end}",)
        return ObjectChange(Action.CHANGE if fields else Action.KEEP, "Deployment", name, fields)

    async def _token(self) -> ObjectChange:
        name = token_secret_name(self._turn.owner.name)
        try:
            held = await self._kube.get(SECRETS, self._turn.owner.namespace, name)
        except NotFound:
            return ObjectChange(Action.CREATE, SECRETS.kind, name)
        except Forbidden:
            self._notes.append(f"Secret {name} may not be read with this kubeconfig; taken as there")
            return ObjectChange(Action.KEEP, SECRETS.kind, name)
        return self._foreign(held, SECRETS.kind) or ObjectChange(Action.KEEP, SECRETS.kind, name)

    def _foreign(self, live: Object, kind: str) -> ObjectChange | None:
        if self._turn.owner.owns(live):
            return None
        error = ForeignObject({**live, "kind": kind})
        return ObjectChange(Action.REFUSED, kind, live["metadata"]["name"], note=f"{error.object} {error.remedy}")

    async def _one(self, child: Object) -> ObjectChange:
        kind, name = child["kind"], child["metadata"]["name"]
        async with self._slots:
            try:
                live: Object | None = await self._kube.get(resource_of(child), self._turn.owner.namespace, name)
            except NotFound:
                live = None
            except Forbidden:
                # Kubernetes' own roles `view` and `edit` see no Roles and no PodMonitors.
                self._note(f"{kind} may not be read with this kubeconfig; taken as it should be")
                return ObjectChange(Action.KEEP, kind, name)
            if live is not None and (foreign := self._foreign(live, kind)) is not None:
                return foreign
            partial = False
            try:
                after = await self._applier.dry_run(child, self._turn.owner)
            except Invalid as error:
                return ObjectChange(Action.REFUSED, kind, name, note=error.message)
            except Forbidden as error:
                if "cannot patch" not in error.message and "cannot create" not in error.message:
                    return ObjectChange(Action.REFUSED, kind, name, note=error.message)
                # The right to write is the operator's; a reader's plan is a comparison without the server's word.
                self._note(f"{kind} may not be written with this kubeconfig; compared without a dry run")
                after, partial = owned(child, self._turn.owner), True
        if live is None:
            return ObjectChange(Action.CREATE, kind, name, _shape(child))
        fields = differences(live, after, partial=partial)
        return ObjectChange(Action.CHANGE if fields else Action.KEEP, kind, name, fields)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    async def _left_over(self, wanted: Sequence[Object]) -> list[ObjectChange]:
        """Children of optional kinds that the spec asks for no more."""
        names = {(child["kind"], child["metadata"]["name"]) for child in wanted}
        found: list[ObjectChange] = []
        for resource in CHILDREN:
            if resource.kind not in OPTIONAL_KINDS:
                continue
            try:
                held = await self._kube.list(
                    resource, self._turn.owner.namespace, selector=f"{MODEL}={self._turn.owner.name}"
                )
            except NotFound:
                continue
            except Forbidden:
                self._note(f"{resource.kind} may not be listed with this kubeconfig; what is left over is not shown")
                continue
            found += [
                ObjectChange(Action.DELETE, resource.kind, obj["metadata"]["name"])
                for obj in held
                if (resource.kind, obj["metadata"]["name"]) not in names and self._turn.owner.owns(obj)
            ]
        return found


def _shape(child: Mapping[str, Any]) -> tuple[str, ...]:
    """Of an object to be made: what a reader wants to know of it."""
    if child["kind"] != "Deployment":
        return ()
    spec = child["spec"]
    images = ", ".join(container["image"] for container in spec["template"]["spec"]["containers"])
    count = f"{spec['replicas']} x " if "replicas" in spec else ""
    return (f"{count}{images}",)
