"""Stop strings: text is shown only up to the first match, and what may begin one is held back.

Works character by character (Knuth-Morris-Pratt, one automaton a string), so the outcome doesn't depend on how the text
was cut into tokens: the match that ends first wins, of several ending together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_STOP_STRINGS = 16
"""OpenAI allows 4; templates of agent frameworks send more."""

MAX_STOP_CHARACTERS = 256


def _failure(pattern: str) -> list[int]:
    """KMP failure function: for each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[i] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[i] == pattern[matched]:
            matched += 1
        table[i] = matched
    return table


class StopWindow:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may be the beginning of a stop string."""
        return self._held

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was found (then nothing may follow).

        While not `armed` (before min_tokens) a whole match passes as text.
        """
        if not self._stops:
            return text, False
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            longest = self._step(seen[position])
            if longest and armed:
                self._held = ""
                return seen[: position + 1 - longest], True
            if longest:
                self._forget_matches()
        keep = max(self._matched)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], False

    def flush(self) -> str:
        """The held text, when the answer ended without a match."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> int:
        """Advance every automaton; length of the longest stop string that ends here, 0 for none."""
        longest = 0
        for i, (stop, failure) in enumerate(self._stops):
            matched = self._matched[i]
            if matched == len(stop):
                matched = failure[matched - 1]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest

    def _forget_matches(self) -> None:
        """Fall back from whole matches to the longest stop prefix that could still become one."""
        for i, (stop, failure) in enumerate(self._stops):
            if self._matched[i] == len(stop):
                self._matched[i] = failure[-1]
