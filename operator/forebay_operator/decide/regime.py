"""How long traffic stays as it is, learnt from how long it has stayed before; and what it was like before."""

from __future__ import annotations

from forebay_operator.decide.memory import Before, Memory
from forebay_operator.decide.types import TICK_SECONDS

SLACK_SECONDS = 0.5
"""Calls come a little early or late."""

WORSE = 0.02
"""Share of misses by which the regime's split must be worse than the cheapest one, for a tick, to end the regime."""

LEAST_SECONDS = 60.0
RUNS = 32


def lasted(since: float, now: float, seconds: float = TICK_SECONDS) -> bool:
    """Whether what was seen at `since` has been seen for a tick: twice at one call a tick, more often at more calls."""
    return now - since >= seconds - SLACK_SECONDS


def follow(memory: Memory, costs: dict[int, float], now: float, least: float = TICK_SECONDS) -> None:
    """`costs`: misses of each split (by prefill workers) at the present load, without any move's price.

    `least`: seconds for which another split must be cheaper without a break. What is over before a move could have
    been is no regime.
    """
    cheapest = min(costs, key=lambda q: (costs[q], abs(q - memory.regime)))
    if memory.regime not in costs:
        memory.regime, memory.regime_since, memory.rivals = cheapest, now, {}
        memory.regime_worse_at, memory.pending = -1.0, None
        return
    if costs[memory.regime] - costs[cheapest] <= WORSE:
        if memory.pending is not None:
            # Traffic that came and went is what the next that comes may be.
            memory.runs = [*memory.runs, now - memory.regime_worse_at][-RUNS:]
        memory.regime_worse_at, memory.pending = -1.0, None
        return
    if memory.pending is None:
        memory.regime_worse_at, memory.pending, memory.pending_rivals = now, Before.of(memory), {}
    elif lasted(memory.regime_worse_at, now, max(TICK_SECONDS, least)):
        began = memory.regime_worse_at
        memory.runs = [*memory.runs, began - memory.regime_since][-RUNS:]
        memory.regime, memory.regime_since = cheapest, began
        memory.before, memory.rivals = memory.pending, memory.pending_rivals
        memory.regime_worse_at, memory.pending = -1.0, None


def dwell(memory: Memory, now: float) -> float:
    """Expected seconds until the regime ends: mean residual of the runs that lasted longer than this one has.

    One run of the present age plus a minute is added, so that a first regime is expected to last as long again at
    most; at least a minute. A regime that is about to be certain counts from when it began.
    """
    since = memory.regime_worse_at if memory.pending is not None else memory.regime_since
    age = now - since
    longer = [run - age for run in memory.runs if run > age]
    return max(LEAST_SECONDS, (sum(longer) + age + LEAST_SECONDS) / (len(longer) + 1))


def regret(memory: Memory, prefill: int) -> float:
    """Requests that the split with `prefill` prefill workers would have saved in the present regime, as modelled."""
    rivals = memory.rivals if memory.pending is None else memory.pending_rivals
    real, rival = rivals.get("real"), rivals.get(str(prefill))
    return real.missed - rival.missed if real is not None and rival is not None else 0.0
