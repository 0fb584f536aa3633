"""Why a Decision is what it is: one constant per rule. docs/rescaling.md explains each."""

from __future__ import annotations

from typing import Final

# The rule that decided.
STARVED: Final = "Starved"
"""A role's demand is half a worker over what serves it: one observation is enough."""

BETTER_SPLIT: Final = "BetterSplit"
"""The gain of another split, replayed over the last arrivals, is worth the move, and was confirmed."""

RESERVE: Final = "Reserve"
"""Another split costs no more and has more decode workers: its prefill shortage is absorbed by convertible decoders."""

BALANCED: Final = "Balanced"
"""No split is better by more than the move costs."""

MISSES_ELSEWHERE: Final = "MissesElsewhere"
"""As Balanced, while requests miss and most of them lose their time to what no split changes."""

CONFIRMING: Final = "Confirming"
"""A better split was seen and is not confirmed yet."""

CAN_WAIT: Final = "CanWait"
"""A better split was seen, and moving there at one of the next looks is as good: most bursts are over by then."""

BOUNDS: Final = "OutOfBounds"
"""The split is outside bounds, ratio or budget, and is put right."""

# Why nothing may move now.
METRICS_MISSING: Final = "MetricsMissing"
METRICS_STALE: Final = "MetricsStale"
METRICS_INVALID: Final = "MetricsInvalid"
COUNTER_RESET: Final = "CounterReset"
"""A source restarted: its counters start again, so one interval has no measurement."""

WARMING_UP: Final = "WarmingUp"
"""The windows are not full yet, after a start or a restart."""

NO_TRAFFIC: Final = "NoTraffic"
MOVING: Final = "Moving"
"""A move is under way, and the wanted one goes the other way."""

UNEXPLAINED: Final = "Unexplained"
"""The model does not explain the misses that are measured, and a move of this gear is too dear for a guess."""

SHORT_REGIME: Final = "ShortRegime"
"""Staying has not lost as much yet as a move would, should traffic change back."""

RATIO_INFEASIBLE: Final = "RatioInfeasible"
PAUSED: Final = "Paused"
OFF: Final = "Off"
NO_OBJECTIVES: Final = "NoObjectives"
"""One of the objectives is not set (0), or both: the demand law alone decides."""

# Why the number of workers changes or does not (size.py).
SHORT: Final = "Short"
"""Demand does not fit the workers there are, at any split."""

IDLE: Final = "Idle"
"""Demand fits one worker less, with a margin, and did for the whole window."""

FITS: Final = "Fits"
PENDING_UNDONE: Final = "PendingUndone"
"""A pod stayed Pending past the deadline: its pool goes back to what is ready."""

BACKING_OFF: Final = "BackingOff"
STABILIZING: Final = "Stabilizing"
"""The need has not lasted for the direction's stabilisation window, or its rate is used up."""

STARTING: Final = "Starting"
TERMINATING: Final = "Terminating"
AT_MOST: Final = "AtMost"
AT_LEAST: Final = "AtLeast"

# What limited a decision.
LIMITED_BY_BOUNDS: Final = "Bounds"
LIMITED_BY_RATIO: Final = "Ratio"
LIMITED_BY_BUDGET: Final = "Budget"
LIMITED_BY_RATE: Final = "RateLimit"
LIMITED_BY_PAUSE: Final = "Pause"

HOLDS: Final = frozenset(
    {METRICS_MISSING, METRICS_STALE, METRICS_INVALID, COUNTER_RESET, WARMING_UP, MOVING, UNEXPLAINED, SHORT_REGIME}
    | {RATIO_INFEASIBLE, PAUSED, OFF}
)
"""Reasons that keep the targets as they are."""
