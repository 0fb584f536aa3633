"""Projection of a wanted split onto bounds, ratio and GPU budget, with the number of workers kept."""

from __future__ import annotations

from dataclasses import dataclass

from forebay_operator.decide import reasons
from forebay_operator.decide.types import Bounds, Split


@dataclass(frozen=True, slots=True)
class Projection:
    split: Split
    limited_by: tuple[str, ...]


class RatioInfeasible(ValueError):
    """No split of the workers satisfies all limits. `nearest` is within bounds and budget, next to the ratio."""

    def __init__(self, message: str, nearest: Split | None) -> None:
        super().__init__(message)
        self.nearest = nearest


def feasible(bounds: Bounds, workers: int) -> list[Split]:
    """Every split of exactly `workers` workers that all limits allow, fewest prefill workers first."""
    return [split for split in _splits(bounds, workers) if not broken(bounds, split)]


def _splits(bounds: Bounds, workers: int) -> list[Split]:
    return [Split(p, workers - p) for p in range(1, workers)]


def broken(bounds: Bounds, split: Split) -> tuple[str, ...]:
    """Which limits `split` breaks."""
    found = []
    if not (
        bounds.prefill_min <= split.prefill <= bounds.prefill_max
        and bounds.decode_min <= split.decode <= bounds.decode_max
    ):
        found.append(reasons.LIMITED_BY_BOUNDS)
    low, high = bounds.ratio_min, bounds.ratio_max
    if (low is not None and split.prefill * low.decode < low.prefill * split.decode) or (
        high is not None and split.prefill * high.decode > high.prefill * split.decode
    ):
        found.append(reasons.LIMITED_BY_RATIO)
    gpus = split.prefill * bounds.prefill_gpus + split.decode * bounds.decode_gpus
    if bounds.max_gpus is not None and gpus > bounds.max_gpus:
        found.append(reasons.LIMITED_BY_BUDGET)
    return tuple(found)


def project(bounds: Bounds, wanted: Split) -> Projection:
    """The allowed split of as many workers that is nearest to `wanted`; of two, the one with more decode workers.

    Decode shortage is a cliff and prefill shortage can be absorbed. Raises RatioInfeasible.
    """
    allowed = feasible(bounds, wanted.total)
    if not allowed:
        raise _infeasible(bounds, wanted)
    best = min(allowed, key=lambda s: (abs(s.prefill - wanted.prefill), s.prefill))
    return Projection(best, broken(bounds, wanted) if best != wanted else ())


def _infeasible(bounds: Bounds, wanted: Split) -> RatioInfeasible:
    counts = [s for s in _splits(bounds, wanted.total) if reasons.LIMITED_BY_BOUNDS not in broken(bounds, s)]
    within = [s for s in counts if reasons.LIMITED_BY_BUDGET not in broken(bounds, s)]
    limits = (
        f"prefill {bounds.prefill_min}-{bounds.prefill_max}, decode {bounds.decode_min}-{bounds.decode_max}, "
        f"ratio {bounds.ratio_min or 'any'}-{bounds.ratio_max or 'any'}, "
        f"GPUs {bounds.max_gpus if bounds.max_gpus is not None else 'any'}"
    )
    nearest = min(within, key=lambda s: (_ratio_error(bounds, s), abs(s.prefill - wanted.prefill)), default=None)
    remedy = f"the nearest within bounds is {nearest}" if nearest else "change the bounds or the number of workers"
    return RatioInfeasible(f"no split of {wanted.total} workers satisfies {limits}; {remedy}", nearest)


def _ratio_error(bounds: Bounds, split: Split) -> float:
    share = split.prefill / split.decode
    error = 0.0
    if bounds.ratio_min is not None:
        error = max(error, bounds.ratio_min.prefill / bounds.ratio_min.decode / share)
    if bounds.ratio_max is not None:
        error = max(error, share / (bounds.ratio_max.prefill / bounds.ratio_max.decode))
    return error
