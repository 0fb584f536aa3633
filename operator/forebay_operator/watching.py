"""Whether the watches still report: each of our own writes must come back through its watch within a time. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

REMEMBERED: Final = 10_000
"""Objects whose last reported version is known, the latest ones."""


class WatchHealth:
    """Nothing is expected of an idle watch, so a quiet cluster is a healthy one."""

    def __init__(self, stale_after: float) -> None:
        """`stale_after` in seconds."""
        self._stale_after = stale_after
        self._expected: dict[Hashable, float] = {}
        self._reported: dict[Hashable, str] = {}

    def wrote(self, key: Hashable, version: str, now: float) -> None:
        """The object of `key` was changed by us, to that resourceVersion."""
        # The watch may be faster than the answer to the write: what it told then is not told again.
        if not _reaches(self._reported.get(key, ""), version):
            self._expected.setdefault(key, now)

    def seen(self, key: Hashable, version: str) -> None:
        """A watch reported the object in that version, or its end."""
        self._expected.pop(key, None)
        self._reported.pop(key, None)
        self._reported[key] = version
        if len(self._reported) > REMEMBERED:
            del self._reported[next(iter(self._reported))]

    def gone(self, key: Hashable) -> None:
        """The object was asked for, and is not there: a watch that had to begin anew since never tells of its end."""
        self._expected.pop(key, None)
        self._reported.pop(key, None)

    def stale(self, now: float) -> str | None:
        """Why the watches are not to be trusted; None when they are."""
        late = [(at, key) for key, at in self._expected.items() if now - at > self._stale_after]
        if not late:
            return None
        at, key = min(late, key=lambda entry: entry[0])
        return f"a write of {key} {now - at:.0f} s ago has not come back through its watch; {len(late)} such"


def _reaches(reported: str, written: str) -> bool:
    """Versions are opaque by contract, and increasing numbers at every API server there is."""
    if reported.isdecimal() and written.isdecimal():
        return int(reported) >= int(written)
    return reported == written
