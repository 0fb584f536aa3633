"""What a replay's outcome is worth. Definitions are those of the router's metrics (docs/rescaling.md)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay_operator.replay.cluster import Outcome, Setup

ITL_SHARE = 0.95
"""A request's gaps that must hold the TPOT objective for `itl95_percent`."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    attainment_percent: float
    """Requests that met both objectives, of all offered: refused and unfinished ones missed."""

    ttft_percent: float
    tpot_percent: float
    itl95_percent: float
    """Requests with 95 % of their gaps within the TPOT objective, of all offered."""

    goodput: float
    """Requests per second that met both."""

    refused: int
    unfinished: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    gpu_seconds: float
    moves: int
    gear: str
    splits: dict[str, float]
    """Seconds at each prefill:decode of serving workers."""

    preemptions: int
    handed_on: int
    """Requests that the end of a drain sent to another worker."""


def score(outcome: Outcome, setup: Setup, *, after: float = 0.0) -> Score:
    """Of the requests that arrived `after` that many seconds or later; moves and seconds are of the whole replay."""
    ttfts: list[float] = []
    tpots: list[float] = []
    total = both = ttft_met = tpot_met = smooth = refused = unfinished = 0
    for job in outcome.jobs:
        if job.arrived < after:
            continue
        total += 1
        if job.refused:
            refused += 1
            continue
        if job.first < 0:
            unfinished += 1
            continue
        ttft = job.first - job.arrived
        ttfts.append(ttft)
        good_ttft = ttft <= setup.ttft_seconds
        ttft_met += good_ttft
        if job.last < 0:
            unfinished += 1
            continue
        gaps = job.output - 1
        tpot = (job.last - job.first) / gaps if gaps else 0.0
        if gaps:
            tpots.append(tpot)
        good_tpot = tpot <= setup.tpot_seconds
        tpot_met += good_tpot
        smooth += job.slow_gaps <= (1 - ITL_SHARE) * gaps
        both += good_ttft and good_tpot
    seconds = max(outcome.jobs[-1].arrived - after, 1e-9) if outcome.jobs else 1.0
    held: dict[str, float] = {}
    before = 0.0
    for at, prefill, decode, _ in outcome.splits:
        held[f"{prefill}:{decode}"] = held.get(f"{prefill}:{decode}", 0.0) + at - before
        before = at
    percentiles = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return Score(
        requests=total,
        attainment_percent=_percent(both, total),
        ttft_percent=_percent(ttft_met, total),
        tpot_percent=_percent(tpot_met, total),
        itl95_percent=_percent(smooth, total),
        goodput=round(both / seconds, 3),
        refused=refused,
        unfinished=unfinished,
        ttft_ms=_milliseconds(ttfts, percentiles),
        tpot_ms=_milliseconds(tpots, percentiles),
        itl_ms={name: round(outcome.gaps.percentile(share) * 1e3, 1) for name, share in percentiles.items()},
        gpu_seconds=round(outcome.ended_at * setup.workers * setup.model.tp, 1),
        moves=outcome.moves,
        gear=setup.gear.name,
        splits={key: round(value, 1) for key, value in sorted(held.items())},
        preemptions=outcome.preemptions,
        handed_on=outcome.handed_on,
    )


def _percent(part: int, whole: int) -> float:
    return round(100.0 * part / whole, 3) if whole else 0.0


def _milliseconds(values: Sequence[float], shares: dict[str, float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 1)
        for name, share in shares.items()
    }
