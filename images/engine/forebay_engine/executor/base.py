"""The two things that differ between a real and a simulated worker: who computes a step, and where KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.types import SequenceStep, StepOutput


class Executor(Protocol):
    """Computes steps over its arena. Synchronous; called from the core's step thread only."""

    layout: ArenaLayout
    num_blocks: int
    vocab_size: int

    def base_address(self) -> int:
        """Address of the arena's first byte in this process (0 where it has none)."""

    def execute(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        """Run one step; outputs in the order of `steps`. Blocks (or sleeps, simulated) until done."""

    def close(self) -> None: ...
