"""Which worker serves in which role: targets are desired state, labels realise them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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

    A new worker gets the role furthest below its target, its home pool on a tie, as soon as it is ready. A worker that
    has a role is switched when one role is over its target while the other is under, or when a role has lost its last
    worker to a node that is being emptied and the other has two (`switching` allows it). Workers on cordoned nodes
    don't count: they are about to go.
    """
    leaving = {node.name for node in observation.nodes or () if node.cordoned}
    staying = [p for p in observation.pods if not p.terminating and not p.draining and p.node not in leaving]
    held = {pool: sum(p.role == pool for p in staying if p.ready) for pool in POOLS}
    changes: list[RoleChange] = []
    for pod in sorted((p for p in observation.pods if _wants_role(p)), key=lambda p: (p.created_unix, p.name)):
        role = _furthest_below(held, targets, pod.pool)
        held[role] += 1
        changes.append(RoleChange(pod.name, pod.uid, role, None))
    if switching and not changes:
        changes += _switches([p for p in staying if p.ready and p.role is not None], held, targets)
    return tuple(changes)


def _wants_role(pod: PodView) -> bool:
    return pod.serving and pod.role is None


def _furthest_below(held: Mapping[Pool, int], targets: Targets, home: Pool) -> Pool:
    return max(POOLS, key=lambda role: (targets[role] - held[role], role == home))


def _switches(pods: list[PodView], held: Mapping[Pool, int], targets: Targets) -> list[RoleChange]:
    if (count := _missing("prefill", "decode", held, targets)) > 0:
        to: Pool = "prefill"
        prefill = held["prefill"] + count
    elif (count := _missing("decode", "prefill", held, targets)) > 0:
        to = "decode"
        prefill = held["prefill"] - count
    else:
        return []
    workers = [WorkerRole(p.name, p.pool, p.serves_as, _work(p)) for p in pods]
    chosen = switch(workers, Ratio(prefill, len(workers) - prefill))
    return [RoleChange(p.name, p.uid, to, p.role) for p in pods if chosen.get(p.name) == to]


def _missing(to: Pool, source: Pool, held: Mapping[Pool, int], targets: Targets) -> int:
    """Workers that `source` has to spare and `to` lacks."""
    count = min(targets[to] - held[to], held[source] - targets[source])
    starved = held[to] == 0 and targets[to] > 0 and held[source] >= 2
    return max(count, 1) if starved else count


def _work(pod: PodView) -> int:
    return UNKNOWN_LOAD if pod.load is None else pod.load.running + pod.load.waiting
