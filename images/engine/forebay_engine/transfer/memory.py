"""Where an arena lies, as NIXL is told, and how blocks get from a landing place beside it into it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's names of host memory and of a GPU's memory."""


@dataclass(frozen=True, slots=True)
class Place:
    kind: Kind
    device: int = 0
    """CUDA's number of the GPU, in the process whose memory it is."""


HOST = Place("DRAM")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that `owner` keeps alive."""

    address: int
    nbytes: int
    owner: object


class ArenaMemory(Protocol):
    """Of one arena. Thread-safe."""

    place: Place

    def enter(self) -> None:
        """Before this thread calls NIXL: UCX works on a GPU's memory in the calling thread's CUDA context."""

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the arena's own kind, so that a read into it takes the route that one into the arena takes."""

    def put(self, buffer: Buffer, blocks: Sequence[int]) -> None:
        """The i-th block's worth of the buffer -> arena block blocks[i]; done when it returns."""


def host_buffer(nbytes: int) -> Buffer:
    # Simulated workers import this file, and their image has no numpy.
    import numpy as np

    memory = np.empty(nbytes, dtype=np.uint8)
    return Buffer(memory.ctypes.data, nbytes, memory)


class HostMemory:
    """An arena in this process's memory."""

    place = HOST

    def __init__(self, address: int, block_bytes: int) -> None:
        self._address = address
        self._block_bytes = block_bytes

    def enter(self) -> None:
        """Nothing to do."""

    def allocate(self, nbytes: int) -> Buffer:
        return host_buffer(nbytes)

    def put(self, buffer: Buffer, blocks: Sequence[int]) -> None:
        size = self._block_bytes
        for i, block in enumerate(blocks):
            ctypes.memmove(self._address + block * size, buffer.address + i * size, size)
