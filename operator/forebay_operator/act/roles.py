"""Which worker serves in which role: targets are desired state, labels realise them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.ratio import Ratio
from forebay_operator.local.roles import WorkerRole, switch
from forebay_operator.observe.types import Observation, PodView

Targets = Mapping[Pool, int]

UNKNOWN_LOAD = 10**9
"""A worker without a report is the last to be switched."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    pod: str
    uid: str
    role: Pool
    was: Pool | None
    """None: it had none yet."""


def role_changes(observation: Observation, targets: Targets, *, switching: bool) -> tuple[RoleChange, ...]:
    """Labels to set, so that as many workers serve in each role as `targets` say.

    A new worker, once ready, gets its home pool's role while that is below its target, else the role furthest below: so
    the replacement of one on loan takes the loan over, and workers that start in any order all serve at home. A worker
    that has a role is switched when one role is over its target while the other is under (`switching` allows it).
    Workers on cordoned nodes don't count: they are about to go. Until their replacements serve, a role that loses
    workers so gets its share of those that stay.
    """
    leaving = {node.name for node in observation.nodes or () if node.cordoned}
    staying = [p for p in observation.pods if not p.terminating and not p.draining and p.node not in leaving]
    held = {pool: sum(p.role == pool for p in staying if p.ready) for pool in POOLS}
    changes: list[RoleChange] = []
    for pod in sorted((p for p in observation.pods if _wants_role(p)), key=lambda p: (p.created_unix, p.name)):
        role = _role_for(held, targets, pod.pool)
        held[role] += 1
        changes.append(RoleChange(pod.name, pod.uid, role, None))
    if switching and not changes:
        emptied = {p.role for p in observation.pods if p.node in leaving and not p.terminating}
        changes += _switches([p for p in staying if p.ready and p.role is not None], held, targets, emptied)
    return tuple(changes)


def _wants_role(pod: PodView) -> bool:
    return pod.serving and pod.role is None


def _role_for(held: Mapping[Pool, int], targets: Targets, home: Pool) -> Pool:
    if held[home] < targets[home]:
        return home
    return max(POOLS, key=lambda role: (targets[role] - held[role], role == home))


def _switches(
    pods: list[PodView], held: Mapping[Pool, int], targets: Targets, emptied: Set[Pool | None]
) -> list[RoleChange]:
    if (count := _missing("prefill", "decode", held, targets, emptied)) > 0:
        to: Pool = "prefill"
        prefill = held["prefill"] + count
    elif (count := _missing("decode", "prefill", held, targets, emptied)) > 0:
        to = "decode"
        prefill = held["prefill"] - count
    else:
        return []
    workers = [WorkerRole(p.name, p.pool, p.serves_as, _work(p)) for p in pods]
    chosen = switch(workers, Ratio(prefill, len(workers) - prefill))
    return [RoleChange(p.name, p.uid, to, p.role) for p in pods if chosen.get(p.name) == to]


def _missing(to: Pool, source: Pool, held: Mapping[Pool, int], targets: Targets, emptied: Set[Pool | None]) -> int:
    """Workers that `source` has to spare and `to` lacks."""
    count = min(targets[to] - held[to], held[source] - targets[source])
    if to not in emptied:
        return count
    shares = _shares(targets, sum(held.values()))
    return max(count, min(shares[to] - held[to], held[source] - shares[source]))


def _shares(targets: Targets, workers: int) -> dict[Pool, int]:
    """The targets' proportion on fewer workers, rounded down, one at least of each role that has a target."""
    total = max(1, sum(targets.values()))
    return {pool: max(workers * targets[pool] // total, min(1, targets[pool])) for pool in POOLS}


def _work(pod: PodView) -> int:
    return UNKNOWN_LOAD if pod.load is None else pod.load.running + pod.load.waiting
