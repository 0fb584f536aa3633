"""A worker that no node takes: after a deadline its pool does without it, for a while. Pure.

Only of pools whose size is the law's: a fixed size is what somebody asked for, and a cluster autoscaler may yet bring a
node. The memory of it is written to status with the count it belongs to, so a restart neither forgets nor repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.scaling import Bounds
from forebay_operator.homes import PENDING_LEAST_SECONDS
from forebay_operator.observe.types import Observation, PodView

HELD_SECONDS: Final = 900.0
"""For so long the pool is not asked to grow again past what found a node."""

UNDONE: Final = "undone"
"""Key in status.memory."""


@dataclass(frozen=True, slots=True)
class Undone:
    asked: int
    placed: int
    until: datetime
    waited: float = PENDING_LEAST_SECONDS
    """Seconds that it had for finding a node."""

    def to_status(self) -> dict[str, Any]:
        until = self.until.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"asked": self.asked, "placed": self.placed, "until": until, "waited": round(self.waited)}

    @staticmethod
    def from_status(value: Any) -> Undone | None:
        try:
            waited = float(value.get("waited", PENDING_LEAST_SECONDS))
            return Undone(int(value["asked"]), int(value["placed"]), datetime.fromisoformat(value["until"]), waited)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def describe(self, pool: Pool) -> str:
        until = self.until.astimezone(UTC).strftime("%H:%M UTC")
        return (
            f"{pool}: {self.asked} workers were asked for and {self.placed} found a node within "
            f"{self.waited:.0f} s; held at {self.placed} until {until}. Add nodes, or lower maxReplicas"
        )


@dataclass(frozen=True, slots=True)
class Placed:
    counts: dict[Pool, int]
    undone: dict[Pool, Undone]
    fresh: tuple[Pool, ...] = ()
    """Pools in which this look has undone something."""

    wake: float | None = None
    """Seconds until a pod that has no node now is due."""


class Waits:
    """How long workers have been without a node, by the observer's own clock: the API server's, which creationTimestamp
    is of, may be minutes from it."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def look(self, observation: Observation, now: float) -> dict[str, float]:
        """Seconds by the pod's uid."""
        # After a restart all wait anew: one deadline more is cheap, and a worker that was to get its node is not.
        self._since = {p.uid: self._since.get(p.uid, now) for p in observation.pods if _unplaced(p)}
        return {uid: now - since for uid, since in self._since.items()}


def undo_pending(
    counts: Mapping[Pool, int],
    bounds: Mapping[Pool, Bounds],
    observation: Observation,
    remembered: Mapping[str, Any],
    now: datetime,
    wait: float = PENDING_LEAST_SECONDS,
    *,
    given: Collection[Pool] = (),
    ask_again: bool = False,
    waited: Mapping[str, float] | None = None,
) -> Placed:
    """`counts` without the workers that found no node within `wait` seconds (homes.pending_seconds: by how long workers
    usually take to start). `remembered` is status.memory's entry.

    `given`: pools whose size somebody else sets. `ask_again`: no law sizes the others, so what was undone is asked for
    here once its time is over. Else a node that was away for a while would cost its pool a worker for good. `waited`:
    Waits.look(). None: of who looks once, to whom creationTimestamp is all that tells.
    """
    wanted, undone = dict(counts), {}
    fresh: list[Pool] = []
    wake: float | None = None
    for pool in POOLS:
        if pool in given:
            continue
        held = Undone.from_status(remembered.get(pool))
        # A clock that was set back must not hold a pool for longer than was meant.
        if held is not None and now < held.until <= now + timedelta(seconds=HELD_SECONDS):
            undone[pool] = held
            wanted[pool] = min(wanted[pool], max(held.placed, bounds[pool].min_replicas))
        elif held is not None and ask_again:
            wanted[pool] = max(wanted[pool], min(held.asked, bounds[pool].max_replicas))
        if bounds[pool].min_replicas == bounds[pool].max_replicas or _rolling(observation, pool):
            continue
        pods = [p for p in observation.of_pool(pool) if not p.terminating]
        if waited is None:
            ages = [now.timestamp() - p.created_unix for p in pods if _unplaced(p)]
        else:
            ages = [waited.get(p.uid, 0.0) for p in pods if _unplaced(p)]
        late = sum(age >= wait for age in ages)
        placed = max(len(pods) - late, bounds[pool].min_replicas)
        if late and wanted[pool] > placed:
            most = max(wanted[pool], undone[pool].asked if pool in undone else 0)
            undone[pool] = Undone(most, placed, now + timedelta(seconds=HELD_SECONDS), wait)
            wanted[pool] = placed
            fresh.append(pool)
        young = [wait - age for age in ages if age < wait]
        if young:
            wake = min([*young, *([] if wake is None else [wake])])
    return Placed(wanted, undone, tuple(fresh), wake)


def _unplaced(pod: PodView) -> bool:
    return pod.node is None and pod.phase == "Pending" and pod.created_unix > 0


def _rolling(observation: Observation, pool: Pool) -> bool:
    """Its workers are being replaced: who waits there waits for the place of another."""
    return sum(d.replicas > 0 for d in observation.deployments if d.pool == pool) > 1
