"""From how few seconds of arrivals a shortage may be told: as few as chance does not explain. Pure."""

from __future__ import annotations

import math
from typing import Final

WINDOWS_SECONDS: Final = (1, 2, 5)
"""Tried in this order; what none of them shows waits for the law's own windows."""

SURE: Final = math.log(10_000)
"""A pool that is just full shows as much by chance less than once in 10,000 looks."""


def beyond_chance(seen: float, expected: float) -> bool:
    """Whether `seen` arrivals are more than Poisson arrivals of the mean `expected` bring (Chernoff's bound)."""
    return seen > expected and _unlikely(seen, expected)


def differs(seen: float, expected: float) -> bool:
    """Whether `seen` events are more, or fewer, than chance makes of the mean `expected`."""
    return _unlikely(seen, expected)


def _unlikely(seen: float, expected: float) -> bool:
    if expected <= 0:
        return seen > 0
    return (seen * math.log(seen / expected) if seen > 0 else 0.0) - seen + expected >= SURE
