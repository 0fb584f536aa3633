"""How long traffic stays as it is, learnt from how long it has stayed before."""

from __future__ import annotations

from forebay_operator.decide.memory import Memory
from forebay_operator.decide.types import TICK_SECONDS

SLACK_SECONDS = 0.5
"""Calls come a little early or late."""

WORSE = 0.02
"""Share of misses by which the regime's split must be worse than the cheapest one, for a tick, to end the regime."""

LEAST_SECONDS = 60.0
RUNS = 16


def lasted(since: float, now: float) -> bool:
    """Whether what was seen at `since` has been seen for a tick: twice at one call a tick, more often at more calls."""
    return now - since >= TICK_SECONDS - SLACK_SECONDS


def follow(memory: Memory, costs: dict[int, float], now: float) -> None:
    """`costs`: misses of each split (by prefill workers) at the present load, without any move's price."""
    cheapest = min(costs, key=lambda q: (costs[q], abs(q - memory.regime)))
    if memory.regime not in costs:
        memory.regime, memory.regime_since, memory.regime_worse_at = cheapest, now, -1.0
        return
    if costs[memory.regime] - costs[cheapest] <= WORSE:
        memory.regime_worse_at = -1.0
        return
    if memory.regime_worse_at < 0:
        memory.regime_worse_at = now
    elif lasted(memory.regime_worse_at, now):
        memory.runs = [*memory.runs, now - memory.regime_since][-RUNS:]
        memory.regime, memory.regime_since, memory.regime_worse_at = cheapest, now, -1.0


def dwell(memory: Memory, now: float) -> float:
    """Expected seconds until the regime ends: mean residual of the runs that lasted longer than this one has.

    One run of the present age plus a minute is added, so that a first regime is expected to last as long again at
    most; at least a minute.
    """
    age = now - memory.regime_since
    longer = [run - age for run in memory.runs if run > age]
    return max(LEAST_SECONDS, (sum(longer) + age + LEAST_SECONDS) / (len(longer) + 1))
