"""Somebody else keeps writing what the operator writes: it is put back once, and then left for a while. Pure.

Two controllers that each put their own value back would write for ever. A person's `kubectl scale` is one write, and
is put back; an HPA or another controller writes again, and gets its way until the truce ends. Each further round makes
the truce twice as long. Held in memory: after a restart one more round is fought.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forebay_operator.api.labels import FIELD_MANAGER

WINDOW_SECONDS: Final = 6 * 3600.0
FIRST_SECONDS: Final = 600.0
LONGEST_SECONDS: Final = 3600.0
MANAGERS: Final = 4
"""Named in a message."""


@dataclass(frozen=True, slots=True)
class Writer:
    """A field manager that wrote a field of ours."""

    manager: str
    write: str
    """What tells this write from its next one: its time, or the generation or version that was found."""


@dataclass(slots=True)
class _Held:
    rounds: dict[str, float] = field(default_factory=dict)
    """When each write was first seen."""

    managers: set[str] = field(default_factory=set)
    until: float = 0.0

    def lasts(self, now: float) -> bool:
        """Not for longer than was meant, should the clock be set back."""
        return 0.0 < self.until - now <= LONGEST_SECONDS


class Truce:
    def __init__(self) -> None:
        self._held: dict[Hashable, _Held] = {}

    def seen(self, about: Hashable, writers: tuple[Writer, ...], now: float) -> bool:
        """Note who changed fields of ours; whether that is news. `now` in seconds."""
        held = self._held.get(about)
        if held is not None:
            held.rounds = {write: at for write, at in held.rounds.items() if now - at < WINDOW_SECONDS}
            if not held.rounds and not writers:
                del self._held[about]
        fresh = [writer for writer in writers if held is None or writer.write not in held.rounds]
        if not fresh:
            return False
        held = self._held.setdefault(about, _Held())
        held.rounds.update({writer.write: now for writer in fresh})
        held.managers |= {writer.manager for writer in fresh}
        if len(held.rounds) > 1:
            held.until = now + min(FIRST_SECONDS * 2.0 ** min(len(held.rounds) - 2, 8), LONGEST_SECONDS)
        return True

    def about(self) -> list[Any]:
        """All that anything is known of."""
        return list(self._held)

    def forget(self, gone: Iterable[Hashable]) -> None:
        """Nobody writes what is not there any more."""
        for about in list(gone):
            self._held.pop(about, None)

    def holds(self, about: Hashable, now: float) -> bool:
        held = self._held.get(about)
        return held is not None and held.lasts(now)

    def held(self, now: float) -> list[Hashable]:
        return [about for about, held in self._held.items() if held.lasts(now)]

    def left(self, now: float) -> float | None:
        """Seconds until the next truce ends."""
        return min((held.until - now for held in self._held.values() if held.lasts(now)), default=None)

    def managers(self, about: Hashable) -> tuple[str, ...]:
        held = self._held.get(about)
        return () if held is None else tuple(sorted(held.managers))[:MANAGERS]


def writers_of(live: Mapping[str, Any], path: tuple[str, ...]) -> tuple[Writer, ...]:
    """Managers but ours that own the field at `path`, by whatever way they wrote it (the scale subresource too)."""
    found: list[Writer] = []
    # The API server gives no time to an entry of the scale subresource whose value was ours too, for a while.
    generation = f"generation {live['metadata'].get('generation')}"
    for entry in live["metadata"].get("managedFields") or []:
        if entry.get("manager") == FIELD_MANAGER or entry.get("subresource") == "status":
            continue
        fields: Any = entry.get("fieldsV1") or {}
        for step in path:
            fields = fields.get(f"f:{step}") if isinstance(fields, Mapping) else None
        if fields is not None:
            found.append(Writer(str(entry.get("manager")), str(entry.get("time") or generation)))
    return tuple(found)
