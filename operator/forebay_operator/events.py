"""Kubernetes Events about a model: one for each change, of a fixed list of reasons. They expire; status does not."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from forebay_operator.kube import EVENTS, ApiError, Kube, Object

log = logging.getLogger(__name__)

CONTROLLER: Final = "serving.forebay.dev/operator"
_NOTE_LIMIT: Final = 1000


class Why(StrEnum):
    WORKER_LEAVES = "WorkerLeaves"
    WORKER_LEFT = "WorkerLeft"
    RESCALED = "Rescaled"
    """The rescaling law set new targets."""

    ROLE_CHANGED = "RoleChanged"
    FOREIGN_WRITER = "ForeignWriter"
    """Somebody else set what the operator sets."""

    WORKER_UNDONE = "WorkerUndone"
    """A worker found no node in time, and its pool does without it for a while."""

    FIELD_OWNERSHIP_TAKEN = "FieldOwnershipTaken"
    """Somebody had changed a field of a child; it was put back."""


@dataclass(frozen=True, slots=True)
class Event:
    reason: str
    action: str
    note: str
    warning: bool = False


def condition_events(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Event, ...]:
    """One for each condition whose status is another than before, of those that a person would act on."""
    held = {c["type"]: c for c in before.get("conditions") or []}
    events: list[Event] = []
    for condition in after.get("conditions") or []:
        kind = condition["type"]
        was = held.get(kind, {}).get("status")
        now = condition["status"]
        if kind not in _BAD or was == now or (was is None and now != _BAD[kind]):
            continue
        note = f"{kind} is {now}: {condition.get('message', '')}".rstrip(": ")
        events.append(Event(condition["reason"], "Observe", note, warning=now == _BAD[kind]))
    return tuple(events)


_BAD: Final = {
    "Ready": "False",
    "Stalled": "True",
    "PinningSatisfied": "False",
    "TransportReady": "False",
    "ForeignWriter": "True",
}
"""The conditions that events are made of, and the status that is a warning."""


class Recorder:
    def __init__(self, kube: Kube, instance: str, wall: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._kube = kube
        self._instance = instance[:128]
        self._wall = wall

    async def record(self, model: Object, event: Event) -> None:
        """Best effort: an event that can't be written is logged, and nothing depends on it."""
        meta, now = model["metadata"], self._wall()
        stamp = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        name = hashlib.sha256(f"{meta['uid']}{stamp}{event.reason}{event.note}".encode()).hexdigest()[:16]
        body: Object = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{meta['name']}.{name}", "namespace": meta["namespace"]},
            "eventTime": stamp,
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": event.action,
            "reason": event.reason,
            "note": event.note[:_NOTE_LIMIT],
            "type": "Warning" if event.warning else "Normal",
            "regarding": {
                "apiVersion": model["apiVersion"],
                "kind": model["kind"],
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
        }
        try:
            await self._kube.create(EVENTS, body)
        except ApiError as error:
            log.info("event %s of %s/%s is not recorded: %s", event.reason, meta["namespace"], meta["name"], error)
