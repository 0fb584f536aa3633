"""What a process tells its peers about itself, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class TransferCounters:
    """Totals since start; `seconds` are those of successful pulls, `failures` are by one-word reason."""

    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0
    leases_expired: int = 0
    failures: Counter[str] = field(default_factory=Counter)
