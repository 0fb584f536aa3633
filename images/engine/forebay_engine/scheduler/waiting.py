"""The waiting line: first come, first served, with a preempted sequence back at its old place."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from forebay_engine.scheduler.state import SequenceState


class WaitingQueue:
    """Ordered by SequenceState.order. New requests go to the end in O(1)."""

    def __init__(self) -> None:
        self._line: deque[SequenceState] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._line)

    def head(self) -> SequenceState:
        return self._line[0]

    def add(self, state: SequenceState) -> None:
        if not self._line or self._line[-1].order < state.order:
            self._line.append(state)
        else:
            # A preempted sequence, or one whose place was taken by a reservation: older than most who wait.
            self._line.insert(bisect_left(self._line, state.order, key=lambda other: other.order), state)

    def remove(self, state: SequenceState) -> None:
        if self._line and self._line[0] is state:
            self._line.popleft()
        else:
            self._line.remove(state)
