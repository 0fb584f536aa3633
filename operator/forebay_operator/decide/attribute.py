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

SECONDS: Final = 60.0
SHARE: Final = 0.02
"""Of the last minute's requests: what misses are worth a word. Once said, it is said until they are half of it."""

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
    """None: some of it is not known."""
    if not totals:
        return None
    last = totals[-1]
    recent = [t for t in totals if t.at > last.at - SECONDS - 1e-6]
    first = recent[0]
    if last.missed_in is None or first.missed_in is None or any(t.missed_in is None for t in recent):
        return None
    parts = last.missed_in.since(first.missed_in)
    requests = last.finished + last.refused - first.finished - first.refused
    return None if parts is None or requests < 0 else Missed(requests, parts)


def without_old(totals: Totals, now: float) -> Totals:
    """Parts of totals that last_minute() does not look at are not kept: ten minutes of them would fill a checkpoint."""
    if totals.missed_in is None or totals.at > now - SECONDS - 1e-6:
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


def elsewhere(missed: Missed | None, before: bool) -> tuple[bool, str]:
    """Whether enough requests missed, most of them by what no split changes; and the message.

    `before`: whether it was so at the last look. Else a share at the bar would write another decision each few seconds.
    """
    if missed is None:
        return False, ""
    enough = 0.5 if before else 1.0
    total, parts = missed.parts.total, {part: getattr(missed.parts, part) for part in REMEDIES}
    if total < enough * max(LEAST, SHARE * missed.requests) or 2 * sum(parts.values()) <= total:
        return False, ""
    part = max(parts, key=lambda name: parts[name])
    share = 100 * total / max(1, missed.requests)
    named = {"transfer": "lost their time in transfer", "router": "waited in the router", "failed": "failed"}[part]
    return True, (
        f"{share:.1f} % of the last minute's {missed.requests} requests missed: {parts[part]} of {total} {named}; "
        f"another split won't help: {REMEDIES[part]}"
    )
