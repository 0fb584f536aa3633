"""What the requests of the last minute that missed lost their time to, and whether a split could change it. Pure.

Explains a split that holds; no move depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from forebay_operator.decide.memory import Totals
from forebay_operator.observe.missed import MissedIn

LEAST_SECONDS: Final = 59.0
MOST_SECONDS: Final = 95.0
"""Of a last minute: looks are a second apart, Prometheus' scrapes up to half a minute."""

SHARE: Final = 0.02
"""Of the last minute's requests: what misses are worth a word."""

KEPT: Final = 0.5
KEPT_SHARE: Final = 0.4
"""What is said stays until misses are half of what makes it said, these parts 40 % of them instead of over half, or
another part twice as large."""

LEAST: Final = 20
"""Misses from which the largest of their parts is no chance."""

REMEDIES: Final = {
    "transfer": "check the transport in use and its rate (status.transport, TransportReady) and the network",
    "router": "check the routers' CPU and the state of the workers they know",
    "failed": "check the routers' retries and log for workers that fail",
}
"""Of the parts that no split changes."""


@dataclass(frozen=True, slots=True)
class Missed:
    requests: int
    """That ended or were refused..."""

    parts: MissedIn
    """...and those that missed."""


def last_minute(totals: Sequence[Totals]) -> Missed | None:
    """None: some of it is not known, or was not looked at."""
    if not totals:
        return None
    last = totals[-1]
    first = next((t for t in reversed(totals) if t.at <= last.at - LEAST_SECONDS), None)
    if first is None or first.at < last.at - MOST_SECONDS or first.missed_in is None or last.missed_in is None:
        return None
    parts = last.missed_in.since(first.missed_in)
    requests = last.finished + last.refused - first.finished - first.refused
    return None if parts is None or requests < 0 else Missed(requests, parts)


def without_old(totals: Totals, now: float) -> Totals:
    """Parts of totals that last_minute() does not look at are not kept: ten minutes of them would fill a checkpoint."""
    if totals.missed_in is None or totals.at >= now - MOST_SECONDS:
        return totals
    return msgspec.structs.replace(totals, missed_in=None)


def inputs(missed: Missed | None) -> dict[str, float]:
    """For a Decision: shares of the last minute's requests, and their number. Nothing where it is not known."""
    if missed is None:
        return {}
    parts, requests = missed.parts, max(1, missed.requests)
    return {
        "requestsLastMinute": float(missed.requests),
        "missedInPrefill": round(parts.prefill / requests, 4),
        "missedInTransfer": round(parts.transfer / requests, 4),
        "missedInDecode": round(parts.decode / requests, 4),
        "missedElsewhere": round((parts.router + parts.failed) / requests, 4),
    }


def elsewhere(missed: Missed | None, before: str) -> tuple[str, str]:
    """The part that most of the misses are due to, where enough requests missed and no split changes it; and the
    message, which begins with its name.

    `before`: the part at the last look, empty for none. It stays until clearly less, or clearly another: else shares
    at the bar would write another decision each few seconds.
    """
    if missed is None:
        return "", ""
    enough, most = (KEPT, KEPT_SHARE) if before else (1.0, 0.5)
    total, parts = missed.parts.total, {part: getattr(missed.parts, part) for part in REMEDIES}
    if total < enough * max(LEAST, SHARE * missed.requests) or sum(parts.values()) <= most * total:
        return "", ""
    part = max(parts, key=lambda name: parts[name])
    if before in parts and parts[before] >= KEPT * parts[part]:
        part = before
    share = 100 * total / max(1, missed.requests)
    named = {"transfer": "lost their time in transfer", "router": "waited in the router", "failed": "failed"}[part]
    return part, (
        f"{part}: {share:.1f} % of the last minute's {missed.requests} requests missed, {parts[part]} of {total} "
        f"{named}; another split won't help: {REMEDIES[part]}"
    )
