"""Host buffers that reads land in when they can't be called back.

A read over TCP is answered by the peer's processor. When the peer stalls and the read is given up, UCX still writes the
answer once the peer goes on, whatever was released or disconnected meanwhile (measured: all of a 180 MB read landed
after release). Such reads therefore land here, and only whole pieces are copied into the arena; a given-up piece keeps
its slot until UCX is done with it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SLOT_BYTES = 16 * 1024 * 1024
MAX_SLOTS = 16


@dataclass(slots=True)
class Slot:
    """`blocks` block-sized places, registered with the transport; `descriptors` is their prepared list."""

    memory: npt.NDArray[np.uint8]
    descriptors: Any
    block_bytes: int

    def copy_out(self, arena_address: int, local_blocks: Sequence[int]) -> None:
        """Place i -> arena block local_blocks[i]."""
        source = self.memory.ctypes.data
        for i, block in enumerate(local_blocks):
            ctypes.memmove(arena_address + block * self.block_bytes, source + i * self.block_bytes, self.block_bytes)


class Staging:
    """At most MAX_SLOTS slots, made when first needed. Not thread-safe: the transport's lock guards it."""

    def __init__(self, block_bytes: int, register: Callable[[npt.NDArray[np.uint8], int], Any]) -> None:
        self.blocks_per_slot = max(1, SLOT_BYTES // block_bytes)
        self._block_bytes = block_bytes
        self._register = register
        self._free: list[Slot] = []
        self.made: list[Slot] = []

    def take(self) -> Slot | None:
        """None while every slot is taken."""
        if self._free:
            return self._free.pop()
        if len(self.made) >= MAX_SLOTS:
            return None
        memory = np.empty(self.blocks_per_slot * self._block_bytes, dtype=np.uint8)
        slot = Slot(memory, self._register(memory, self.blocks_per_slot), self._block_bytes)
        self.made.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)
