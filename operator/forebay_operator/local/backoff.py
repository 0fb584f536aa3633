"""Waits between restarts of a process that keeps ending."""

from __future__ import annotations


class Backoff:
    """0.5 s, doubled up to 30 s; back to the start after a process that ran well.

    The shape is the kubelet's (10 s to 5 min, reset after 10 min), at a pace for someone who watches a terminal.
    """

    def __init__(self, *, first: float = 0.5, limit: float = 30.0, ran_well: float = 60.0) -> None:
        self._first, self._limit, self._ran_well = first, limit, ran_well
        self._next = first

    def after(self, ran_seconds: float) -> float:
        """Seconds to wait before the next start of a process that ended after `ran_seconds`."""
        if ran_seconds >= self._ran_well:
            self._next = self._first
        wait = self._next
        self._next = min(self._next * 2, self._limit)
        return wait
