"""Which workers serve in which role. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forebay_operator.api.ratio import Ratio, parse_ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModel


@dataclass(frozen=True, slots=True)
class WorkerRole:
    name: str
    pool: str
    role: str
    load: int
    """Requests running and waiting."""

    ready: bool = True
    """One that is not keeps its role: it gets nothing to do in any."""


class RatioRefused(ValueError):
    """The ratio asked for cannot be had; the text says why and what can be."""


def fit_ratio(asked: Ratio, workers: int, model: DisaggregatedModel) -> Ratio:
    """Workers per role for a ratio asked for by hand. Raises RatioRefused.

    The ratio must divide the workers there are, and lie within spec.scaling.ratio.
    """
    scaling = model.spec.scaling
    if scaling.role_switching == "Disabled":
        raise RatioRefused("spec.scaling.roleSwitching is Disabled; enable it and start again")
    fitted = asked.fit(workers)
    if fitted is None:
        choices = ", ".join(f"{p}:{workers - p}" for p in range(1, min(workers, 9)))
        raise RatioRefused(f"{asked} does not fit {workers} workers; these do: {choices}")
    low, high = parse_ratio(scaling.ratio.min), parse_ratio(scaling.ratio.max)
    if not (low.at_most(asked) and asked.at_most(high)):
        raise RatioRefused(f"{asked} is outside spec.scaling.ratio, {low} to {high}")
    return fitted


def switch(workers: Iterable[WorkerRole], target: Ratio) -> dict[str, str]:
    """New role of each worker that must change so that `target` holds: as few as can be.

    Those that go back to their home pool are taken first, however busy: else loans in both directions come to stay,
    each on the other's hardware. Then the least loaded, then the one earlier by name. Raises RatioRefused when too few
    of them are ready: a dead worker's new role would serve nobody.
    """
    workers = list(workers)
    prefill = sum(worker.role == "prefill" for worker in workers)
    to, count = (
        ("prefill", target.prefill - prefill) if prefill < target.prefill else ("decode", prefill - target.prefill)
    )
    candidates = sorted(
        (worker for worker in workers if worker.role != to and worker.ready),
        key=lambda worker: (worker.pool != to, worker.load, worker.name),
    )
    if len(candidates) < count:
        away = ", ".join(sorted(worker.name for worker in workers if worker.role != to and not worker.ready))
        raise RatioRefused(
            f"{target} needs {count} more in role {to}, and only {len(candidates)} can change; "
            f"wait for {away} to be ready"
        )
    return {worker.name: to for worker in candidates[:count]}
