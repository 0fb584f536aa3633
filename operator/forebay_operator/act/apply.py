"""Children by server-side apply: one field manager, nothing of others' adopted, nothing written twice.

A child is ours when its controller is the model's very object (by uid). An object of a child's name that is not is left
alone and reported; so is one whose owner has the same name but is another object, which is being collected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.kube import Conflict, Kube, NotFound, Object, Resource, resource_of

_NOT_OURS: Final = ("deployment.kubernetes.io/", "kubectl.kubernetes.io/")
"""Annotations that others keep on our children."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The model that children belong to."""

    name: str
    namespace: str
    uid: str

    def reference(self) -> dict[str, Any]:
        return {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def owns(self, obj: Mapping[str, Any]) -> bool:
        references = obj["metadata"].get("ownerReferences") or []
        return any(reference.get("controller") and reference.get("uid") == self.uid for reference in references)

    def preceded(self, obj: Mapping[str, Any]) -> bool:
        """Whether `obj` belongs to an earlier model of this name. The garbage collector takes it."""
        references = obj["metadata"].get("ownerReferences") or []
        return any(
            reference.get("controller")
            and reference.get("kind") == labels.KIND
            and reference.get("name") == self.name
            and reference.get("uid") != self.uid
            for reference in references
        )


class Result(StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    """Applied, and the server found nothing to change."""

    CACHED = "cached"
    """Not sent: nothing has changed on either side since it was last applied."""


@dataclass(frozen=True, slots=True)
class Applied:
    result: Result
    live: Object | None
    """None when the cache answered."""

    taken_from: tuple[str, ...] = ()
    """`manager: field` for each field of ours that somebody else had changed."""

    version: str = ""
    """resourceVersion that was found."""


class ForeignObject(Exception):
    """An object of a child's name belongs to somebody else."""

    def __init__(self, obj: Mapping[str, Any]) -> None:
        meta = obj["metadata"]
        controller = next((r for r in meta.get("ownerReferences") or [] if r.get("controller")), None)
        whose = f"is controlled by {controller['kind']} {controller['name']}" if controller else "has no controller"
        self.object = f"{obj['kind']} {meta.get('namespace', '')}/{meta['name']}"
        self.remedy = f"{whose} and is not this model's; rename the model, or delete the object if nobody needs it"
        super().__init__(f"{self.object} {self.remedy}")


def check_owned(live: Mapping[str, Any], owner: Owner) -> None:
    """Raises Conflict for a child of an earlier model of this name, which is waited for, else ForeignObject."""
    if owner.owns(live):
        return
    if owner.preceded(live):
        raise Conflict(f"apply {live['kind']} {live['metadata']['name']}", 409, "Collected",
                       "it belongs to a deleted model of the same name and is about to go")  # fmt: skip
    raise ForeignObject(live)


Key = tuple[str, str, str, str]


def key_of(obj: Mapping[str, Any]) -> Key:
    meta = obj["metadata"]
    return (obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint(obj: Mapping[str, Any]) -> str:
    """Changes when somebody changes what an object says, not when its status or its bookkeeping moves on."""
    meta = obj["metadata"]
    annotations = {k: v for k, v in (meta.get("annotations") or {}).items() if not k.startswith(_NOT_OURS)}
    said = {key: value for key, value in obj.items() if key not in ("metadata", "status", "apiVersion", "kind")}
    kept = [meta.get("uid"), meta.get("labels"), annotations, meta.get("ownerReferences")]
    # A terminating object must be seen as another one: it is not there to stay.
    return digest([said, kept, meta.get("deletionTimestamp") is not None])


class ApplyCache:
    """What was applied last and what it looked like then. Lost on restart, which costs one apply per child."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def hit(self, key: Key, intent: str) -> bool:
        held = self._entries.get(key)
        return held is not None and held[0] == intent

    def store(self, key: Key, intent: str, live: Mapping[str, Any]) -> None:
        self._entries[key] = (intent, fingerprint(live))

    def seen(self, obj: Mapping[str, Any]) -> bool:
        """An object was read or watched; drops the entry when somebody has changed it since. True when that is so."""
        key = key_of(obj)
        held = self._entries.get(key)
        if held is None or held[1] == fingerprint(obj):
            return False
        del self._entries[key]
        return True

    def drop(self, key: Key) -> bool:
        return self._entries.pop(key, None) is not None

    def forget(self, namespace: str, names: set[str]) -> None:
        """Drop a model's entries; `names` are its children's."""
        for key in [key for key in self._entries if key[2] == namespace and key[3] in names]:
            del self._entries[key]

    def names(self) -> set[Key]:
        return set(self._entries)


class Applier:
    def __init__(self, kube: Kube, cache: ApplyCache) -> None:
        self._kube = kube
        self.cache = cache
        self._applied: dict[Key, str] = {}
        """Digest of what was applied last. The cache forgets it when somebody changes the object; this does not."""

    async def apply(self, desired: Object, owner: Owner, *, locked: str | None = None) -> Applied:
        """Make the API hold `desired`, an object without nulls. Raises ForeignObject and ApiError.

        `locked`: a resourceVersion that the live object must still have (Conflict when not).
        """
        resource = resource_of(desired)
        intent = owned(desired, owner)
        key, hashed = key_of(intent), digest(intent)
        if self.cache.hit(key, hashed):
            return Applied(Result.CACHED, None)
        try:
            live: Object | None = await self._kube.get(resource, owner.namespace, intent["metadata"]["name"])
        except NotFound:
            live = None
        applied = await (
            self._create(resource, intent, owner)
            if live is None
            else self._change(resource, intent, owner, live, locked)
        )
        if applied.live is not None:
            self.cache.store(key, hashed, applied.live)
            self._applied[key] = hashed
        return applied

    async def _create(self, resource: Resource, intent: Object, owner: Owner) -> Applied:
        # Without force: should somebody create the object right now, values that differ are a Conflict and not a loss.
        made = await self._kube.apply(resource, intent, force=False)
        return Applied(Result.CREATED, made)

    async def _change(
        self, resource: Resource, intent: Object, owner: Owner, live: Object, locked: str | None
    ) -> Applied:
        check_owned(live, owner)
        taken = foreign_changes(intent, live)
        # The uid makes sure that what was checked is what is written.
        metadata = {**intent["metadata"], "uid": live["metadata"]["uid"]}
        if locked is not None:
            metadata["resourceVersion"] = locked
        after = await self._kube.apply(resource, {**intent, "metadata": metadata}, force=True)
        same = after["metadata"].get("resourceVersion") == live["metadata"].get("resourceVersion")
        found = str(live["metadata"].get("resourceVersion"))
        return Applied(Result.UNCHANGED if same else Result.CHANGED, after, taken, found)

    def forget(self, namespace: str, names: set[str]) -> None:
        """Of a model that is gone; `names` are its children's."""
        self.cache.forget(namespace, names)
        for key in [key for key in self._applied if key[2] == namespace and key[3] in names]:
            del self._applied[key]

    def applied_before(self, desired: Object, owner: Owner) -> bool:
        """Whether exactly this was applied last, whatever has become of it since."""
        intent = owned(desired, owner)
        return self._applied.get(key_of(intent)) == digest(intent)

    async def dry_run(self, desired: Object, owner: Owner) -> Object:
        """What an apply would make of `desired`. Raises Invalid or Forbidden when the API server or an admission
        webhook would refuse it."""
        return await self._kube.apply(resource_of(desired), owned(desired, owner), force=True, dry_run=True)

    async def remove(self, obj: Object, owner: Owner) -> bool:
        """Delete a child that should not be there any more; False when it is not ours or gone already."""
        if not owner.owns(obj) or obj["metadata"].get("deletionTimestamp"):
            return False
        self.cache.drop(key_of(obj))
        self._applied.pop(key_of(obj), None)
        try:
            await self._kube.delete(
                resource_of(obj), owner.namespace, obj["metadata"]["name"], uid=obj["metadata"]["uid"]
            )
        except NotFound:
            return False
        return True


def owned(desired: Object, owner: Owner) -> Object:
    """`desired` in the owner's namespace and with its ownerReference."""
    metadata = {**desired["metadata"], "namespace": owner.namespace, "ownerReferences": [owner.reference()]}
    return {**desired, "metadata": metadata}


Step = str | tuple[tuple[str, Any], ...]
"""Of a path: a key, or the keys by which a list's item is known."""


def foreign_changes(intent: Mapping[str, Any], live: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields that `intent` sets, with another value in `live` that a manager other than ours put there."""
    found: list[str] = []
    for entry in live["metadata"].get("managedFields") or []:
        if entry.get("manager") == labels.FIELD_MANAGER or entry.get("subresource"):
            continue
        for path in _leaves(entry.get("fieldsV1") or {}, ()):
            wanted, there = _at(intent, path), _at(live, path)
            if wanted is not None and wanted != there:
                found.append(f"{entry.get('manager')}: {_shown(path)}")
    return tuple(sorted(found)[:16])


def _leaves(fields: Mapping[str, Any], path: tuple[Step, ...]) -> list[tuple[Step, ...]]:
    """Paths of plain fields. A list whose items have keys (`k:`) is looked into, for its items may be of several
    managers; that an item is somebody's (`.`) says nothing of what it holds. Sets (`v:`) are taken whole."""
    leaves: list[tuple[Step, ...]] = []
    for key, below in fields.items():
        if key.startswith("f:"):
            here: tuple[Step, ...] = (*path, key[2:])
            leaves += _leaves(below, here) if _divided(below) else [here]
        elif key.startswith("k:"):
            leaves += _leaves(below, (*path, tuple(sorted(json.loads(key[2:]).items()))))
    return leaves


def _divided(fields: Mapping[str, Any]) -> bool:
    return any(key.startswith(("f:", "k:")) for key in fields)


def _at(obj: Any, path: tuple[Step, ...]) -> Any:
    for step in path:
        if isinstance(step, tuple):
            items = obj if isinstance(obj, list) else []
            obj = next((i for i in items if isinstance(i, Mapping) and all(i.get(k) == v for k, v in step)), None)
        elif isinstance(obj, Mapping):
            obj = obj.get(step)
        else:
            return None
    return obj


def _shown(path: tuple[Step, ...]) -> str:
    text = ""
    for step in path:
        text += f".{step}" if isinstance(step, str) else f"[{','.join(str(value) for _, value in step)}]"
    return text.removeprefix(".")
