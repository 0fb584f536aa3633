"""Whether the watches still report: each of our own writes must come back through its watch within a time. Pure."""

from __future__ import annotations

from collections.abc import Hashable


class WatchHealth:
    """Nothing is expected of an idle watch, so a quiet cluster is a healthy one."""

    def __init__(self, stale_after: float) -> None:
        """`stale_after` in seconds."""
        self._stale_after = stale_after
        self._expected: dict[Hashable, float] = {}

    def wrote(self, key: Hashable, now: float) -> None:
        """The object of `key` was changed by us."""
        self._expected.setdefault(key, now)

    def seen(self, key: Hashable) -> None:
        """A watch reported the object, or its end."""
        self._expected.pop(key, None)

    def stale(self, now: float) -> str | None:
        """Why the watches are not to be trusted; None when they are."""
        late = [(at, key) for key, at in self._expected.items() if now - at > self._stale_after]
        if not late:
            return None
        at, key = min(late, key=lambda entry: entry[0])
        return f"a write of {key} {now - at:.0f} s ago has not come back through its watch; {len(late)} such"
