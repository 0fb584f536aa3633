"""Which worker leaves when a pool shrinks, and what a new one serves as. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from forebay_operator.api.labels import Pool
from forebay_operator.decide import Split
from forebay_operator.local.roles import WorkerRole


def leavers(workers: Iterable[WorkerRole], pool: Pool, count: int) -> list[str]:
    """Of the workers whose home is `pool`, those that do least: not ready first, then idle, then in the pool's role.

    Of two alike the later name, whose prefix cache is the younger.
    """
    own = [worker for worker in workers if worker.pool == pool]
    own.sort(key=lambda worker: (len(worker.name), worker.name), reverse=True)
    own.sort(key=lambda worker: (worker.ready, worker.load, worker.role != pool))
    return [worker.name for worker in own[:count]]


def new_role(serving: Split, target: Split, home: Pool) -> Pool:
    """Of a worker that comes: its home pool's while that is below its target, else the one that lacks more."""
    lack = {"prefill": target.prefill - serving.prefill, "decode": target.decode - serving.decode}
    if lack[home] > 0:
        return home
    return "prefill" if lack["prefill"] > lack["decode"] else "decode" if lack["decode"] > lack["prefill"] else home
