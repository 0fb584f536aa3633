"""What a process tells its peers about itself, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from forebay_engine.core.handle import TransferTotals
from forebay_engine.transfer.memory import HOST, Place
from forebay_wire.messages import Compatibility


@dataclass(frozen=True, slots=True)
class Identity:
    """`transport` is `nixl` or `simulated`: both sides must use the same. `engine_id` is fresh per process start."""

    engine_id: str
    compatibility: Compatibility
    transport: str
    base_address: int
    block_bytes: int
    num_blocks: int
    place: Place = HOST
    """Of the arena. Not part of the compatibility: blocks of one layout can be read from either kind into either."""


@dataclass(slots=True)
class TransferCounters:
    """Totals since start; `failures` are by one-word reason, `totals` by the transport in use at the time."""

    transfers: int = 0
    leases_expired: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    totals: dict[str, TransferTotals] = field(default_factory=dict)
    """Its values are never changed, so a copy may be read by another thread."""

    def count(self, transport: str, volume: int, seconds: float) -> None:
        """A read of `volume` bytes."""
        old = self.totals.get(transport, TransferTotals())
        self.totals[transport] = replace(old, bytes=old.bytes + volume, seconds=old.seconds + seconds)

    def failed(self, transport: str, reason: str) -> None:
        self.failures[reason] += 1
        old = self.totals.get(transport, TransferTotals())
        self.totals[transport] = replace(old, failures=old.failures + 1)
