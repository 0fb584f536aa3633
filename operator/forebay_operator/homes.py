"""The home pools as the law may size them: what they have and may have, and how long a worker takes to start. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.ratio import parse_ratio
from forebay_operator.api.scaling import ScalingRules
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.decide import Bounds, Fleet, Growth, Rate, Rules, Split

STARTS: Final = 8
"""Start-ups kept."""

PENDING_LEAST_SECONDS: Final = 300.0
"""Longer than a cluster autoscaler takes to bring a node, and than a leaving pod's usual end."""

PENDING_MOST_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Workers whose home a pool may be."""

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Homes:
    fleets: Mapping[Pool, Fleet]
    limits: Mapping[Pool, Limits]

    @property
    def sized(self) -> bool:
        """Whether there is anything to decide."""
        return any(limits.fewest < limits.most for limits in self.limits.values())

    @property
    def wanted(self) -> Split:
        return Split(self.fleets["prefill"].wanted, self.fleets["decode"].wanted)

    def ordered(self, counts: Split) -> Homes:
        """With other counts that are decided and not carried out yet."""
        return replace(self, fleets={pool: replace(self.fleets[pool], wanted=getattr(counts, pool)) for pool in POOLS})


def home_limits(
    spec: DisaggregatedModelSpec,
    counts: Mapping[Pool, int],
    yielded: Collection[Pool] = (),
    held: Collection[Pool] = (),
) -> dict[Pool, Limits]:
    """`counts`: as they are. A pool in `yielded` is another's to size; one in `held` found no place for more.

    `spec.replicas` is the sum that a person or an HPA set by /scale: then nothing is left to decide.
    """
    found: dict[Pool, Limits] = {}
    for pool in POOLS:
        bounds, count = spec.bounds(pool), counts[pool]
        if spec.replicas is not None or pool in yielded:
            found[pool] = Limits(count, count)
        else:
            most = min(bounds.max_replicas, count) if pool in held else bounds.max_replicas
            found[pool] = Limits(bounds.min_replicas, max(bounds.min_replicas, most))
    return found


def growth_of(spec: DisaggregatedModelSpec, homes: Homes, starts: Sequence[float]) -> Growth | None:
    """None: every pool's size is given. `starts`: seconds that workers took from wanted to ready, newest last."""
    if not homes.sized:
        return None
    usual, behavior, limits = Growth(), spec.scaling.behavior, homes.limits
    gpus = {pool: spec.gpus_per_worker(pool).count for pool in POOLS}
    return Growth(
        up=usual.up if behavior is None else _rules(behavior.scale_up, usual.up),
        down=usual.down if behavior is None else _rules(behavior.scale_down, usual.down),
        start_seconds=median(starts) if starts else usual.start_seconds,
        pending_seconds=pending_seconds(starts),
        bounds=Bounds(
            prefill_min=limits["prefill"].fewest,
            prefill_max=limits["prefill"].most,
            decode_min=limits["decode"].fewest,
            decode_max=limits["decode"].most,
            ratio_min=parse_ratio(spec.scaling.ratio.min),
            ratio_max=parse_ratio(spec.scaling.ratio.max),
            max_gpus=spec.scaling.max_gpus,
            prefill_gpus=gpus["prefill"],
            decode_gpus=gpus["decode"],
        ),
        homes_serve=spec.scaling.role_switching != "Enabled",
    )


def pending_seconds(starts: Iterable[float]) -> float:
    """How long a worker may take to become ready before its pool does without it: twice what the slowest of the last
    took, at least five minutes and at most half an hour."""
    return min(PENDING_MOST_SECONDS, max(PENDING_LEAST_SECONDS, 2 * max(starts, default=0.0)))


def resized(targets: Split, before: Split, after: Split) -> Split:
    """Role targets when home pools change their sizes: what a pool gains or loses its role does, loans stay."""
    total = after.total
    prefill = targets.prefill + after.prefill - before.prefill
    prefill = min(max(prefill, 1), total - 1)
    return Split(prefill, total - prefill)


def _rules(asked: ScalingRules, usual: Rules) -> Rules:
    rates = tuple(Rate(policy.type, policy.value, float(policy.period_seconds)) for policy in asked.policies)
    window, tolerance = asked.stabilization_window_seconds, asked.tolerance_percent
    return Rules(
        stabilization_seconds=None if window is None else float(window),
        select=asked.select_policy,
        rates=rates or usual.rates,
        tolerance=None if tolerance is None else tolerance / 100,
    )


class StartUps:
    """How long new workers take, by the observer's own clock: seen first, seen ready first."""

    def __init__(self) -> None:
        self._began: dict[str, float | None] | None = None
        """By worker; None: it is ready, or it was there when we came."""

    def look(self, ready: Mapping[str, bool], now: float) -> list[float]:
        """`ready` by name, of the workers there are; seconds of those that have become ready since the last look."""
        before, ended = self._began, []
        self._began = {}
        for name, is_ready in ready.items():
            began = None if before is None else before.get(name, now)
            if is_ready and began is not None and name in (before or ()):
                ended.append(now - began)
            self._began[name] = None if is_ready else began
        return ended
