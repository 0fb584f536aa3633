"""Requests that missed an objective, by what they lost their time to, as routers count it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from forebay_wire import metrics as names

MOST: Final = 10**15
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class MissedIn(msgspec.Struct, frozen=True, array_like=True):
    """Counters, one for each of MISSED_IN and in its order."""

    prefill: Count = 0
    """The prefill role's workers, their queues included; `decode` likewise."""

    transfer: Count = 0
    decode: Count = 0
    router: Count = 0
    """Before anything was sent to a worker."""

    failed: Count = 0
    """Answered with an error, or late since a leg had to be run again."""

    @staticmethod
    def of(parts: dict[str, int]) -> MissedIn:
        """By name. What a newer router may count besides is left out."""
        return MissedIn(*(parts.get(part, 0) for part in names.MISSED_IN))

    def plus(self, other: MissedIn) -> MissedIn:
        return MissedIn(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def since(self, before: MissedIn) -> MissedIn | None:
        """What was counted after `before`; None when any counter went backwards."""
        gone = [a - b for a, b in zip(self.counts, before.counts, strict=True)]
        return None if min(gone) < 0 else MissedIn(*gone)

    @property
    def counts(self) -> tuple[int, ...]:
        value: tuple[int, ...] = msgspec.structs.astuple(self)
        return value

    @property
    def total(self) -> int:
        return sum(self.counts)


def sane(found: MissedIn | None) -> MissedIn | None:
    """`found`, where each counter is one; else None, as if it were not there: these only explain a decision."""
    good = found is not None and all(isinstance(n, int) and 0 <= n <= MOST for n in found.counts)
    return found if good else None
