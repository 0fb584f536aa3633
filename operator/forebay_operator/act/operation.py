"""A worker's orderly leave, recorded in status.operation: what a restarted operator resumes.

The record is written before the first step is taken, and every step is derived from it and from what is seen. So a
restart between any two writes repeats at most the write that was under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from forebay_operator.api.labels import POOLS, Pool


class Cause(StrEnum):
    SCALE_IN = "ScaleIn"
    MOVE = "MoveWorker"
    """The other pool gets its place."""

    ROLLOUT = "Rollout"
    """The worker is of an older revision."""


@dataclass(frozen=True, slots=True)
class Operation:
    cause: Cause
    pool: Pool
    deployment: str
    replicas: int
    """Of the Deployment once the worker has left."""

    pod: str
    uid: str
    started: datetime
    deadline: datetime
    """Then what still runs on it continues on another worker."""

    grows: str = ""
    """The other pool's Deployment that grows once the worker's GPUs are free; empty: none."""

    grows_to: int = 0

    def until(self, now: datetime) -> Operation:
        """The same with a start that is not in the future: the wall clock may have been set back meanwhile."""
        if now >= self.started:
            return self
        return replace(self, started=now, deadline=now + (self.deadline - self.started))

    def to_status(self) -> dict[str, Any]:
        times = {"started": _text(self.started), "deadline": _text(self.deadline)}
        fields = {**asdict(self), "cause": self.cause.value, **times}
        growing = {"growsTo": fields.pop("grows_to"), "grows": fields.pop("grows")}
        return {"kind": "RemoveWorker", **fields, **(growing if self.grows else {})}

    @staticmethod
    def from_status(value: Mapping[str, Any] | None) -> Operation | None:
        """None for none, and for one that this version does not know: the plan then begins anew from what it sees."""
        if not value or value.get("kind") != "RemoveWorker":
            return None
        try:
            pool = next(pool for pool in POOLS if pool == value["pool"])
            return Operation(
                cause=Cause(value["cause"]),
                pool=pool,
                deployment=str(value["deployment"]),
                replicas=int(value["replicas"]),
                pod=str(value["pod"]),
                uid=str(value["uid"]),
                started=datetime.fromisoformat(value["started"]),
                deadline=datetime.fromisoformat(value["deadline"]),
                grows=str(value.get("grows", "")),
                grows_to=int(value.get("growsTo", 0)),
            )
        except (KeyError, TypeError, ValueError, StopIteration):
            return None


def _text(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
