"""Buffers that reads land in when they can't be called back.

A read over TCP is answered by the peer's processor. When the peer stalls and the read is given up, UCX still writes the
answer once the peer goes on, whatever was released or disconnected meanwhile (measured: all of a 180 MB read landed
after release). Such reads therefore land here, and only whole pieces are copied into the arena; a given-up piece keeps
its slot until UCX is done with it. Lease words, which are looked at and not kept, land in slots of their own.
Blocks' slots are of the arena's kind of memory (a GPU's for one in a GPU), words' slots are host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay_engine.transfer.memory import HOST, Buffer, Place, host_buffer
from forebay_engine.transfer.nixl_agent import OURSELVES, NixlAgent

SLOT_BYTES = 16 * 1024 * 1024
MAX_SLOTS = 16


@dataclass(slots=True)
class Slot:
    """Equal places side by side, registered with the agent; `descriptors` is their prepared list."""

    buffer: Buffer
    descriptors: Any

    def number(self) -> int:
        """All bytes of a host buffer as one little-endian integer."""
        return int.from_bytes(ctypes.string_at(self.buffer.address, self.buffer.nbytes), "little")


class Staging:
    """At most MAX_SLOTS slots, made when first needed. Not thread-safe: the agent's lock guards it."""

    def __init__(
        self,
        place_bytes: int,
        agent: NixlAgent,
        *,
        slot_bytes: int = SLOT_BYTES,
        place: Place = HOST,
        allocate: Callable[[int], Buffer] = host_buffer,
    ) -> None:
        self.places = max(1, slot_bytes // place_bytes)
        """In one slot."""

        self.indices = np.arange(self.places, dtype=np.int32)
        """Of its places."""

        self._place_bytes = place_bytes
        self._agent = agent
        self._place = place
        self._allocate = allocate
        self._free: list[Slot] = []
        self.made: list[Slot] = []

    def take(self) -> Slot | None:
        """None while every slot is taken."""
        if self._free:
            return self._free.pop()
        if len(self.made) >= MAX_SLOTS:
            return None
        buffer = self._allocate(self.places * self._place_bytes)
        self._agent.register(buffer.address, buffer.nbytes, self._place)
        descriptors = self._agent.describe(OURSELVES, buffer.address, self._place_bytes, self.places, self._place)
        slot = Slot(buffer, descriptors)
        self.made.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)
