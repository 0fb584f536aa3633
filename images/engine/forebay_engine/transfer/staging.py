"""Host buffers that reads land in when they can't be called back.

A read over TCP is answered by the peer's processor. When the peer stalls and the read is given up, UCX still writes the
answer once the peer goes on, whatever was released or disconnected meanwhile (measured: all of a 180 MB read landed
after release). Such reads therefore land here, and only whole pieces are copied into the arena; a given-up piece keeps
its slot until UCX is done with it. Lease words, which are looked at and not kept, land in slots of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay_engine.transfer.nixl_agent import OURSELVES, NixlAgent

SLOT_BYTES = 16 * 1024 * 1024
MAX_SLOTS = 16


@dataclass(slots=True)
class Slot:
    """Equal places side by side, registered with the agent; `descriptors` is their prepared list."""

    memory: npt.NDArray[np.uint8]
    descriptors: Any
    place_bytes: int

    def copy_out(self, arena_address: int, local_blocks: Sequence[int]) -> None:
        """Place i -> arena block local_blocks[i]."""
        source = self.memory.ctypes.data
        for i, block in enumerate(local_blocks):
            ctypes.memmove(arena_address + block * self.place_bytes, source + i * self.place_bytes, self.place_bytes)

    def number(self) -> int:
        """All its bytes as one little-endian integer."""
        return int.from_bytes(self.memory.tobytes(), "little")


class Staging:
    """At most MAX_SLOTS slots, made when first needed. Not thread-safe: the agent's lock guards it."""

    def __init__(self, place_bytes: int, agent: NixlAgent, *, slot_bytes: int = SLOT_BYTES) -> None:
        self.places = max(1, slot_bytes // place_bytes)
        """In one slot."""

        self._place_bytes = place_bytes
        self._agent = agent
        self._free: list[Slot] = []
        self.made: list[Slot] = []

    def take(self) -> Slot | None:
        """None while every slot is taken."""
        if self._free:
            return self._free.pop()
        if len(self.made) >= MAX_SLOTS:
            return None
        memory = np.empty(self.places * self._place_bytes, dtype=np.uint8)
        self._agent.register(memory.ctypes.data, memory.nbytes)
        descriptors = self._agent.describe(OURSELVES, memory.ctypes.data, self._place_bytes, self.places)
        slot = Slot(memory, descriptors, self._place_bytes)
        self.made.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)
