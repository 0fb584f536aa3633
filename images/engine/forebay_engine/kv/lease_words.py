"""Lease words: memory in which a reader sees by itself whether a lease stands, as it sees the blocks.

A word is set when its lease is granted, and cleared before the lease's blocks can be used for anything else. So a
reader that finds the word *after* its last block has landed has read blocks nobody had touched: for a byte of a
refilled block to be read, it had to be written, and the word was cleared before that. (The order of the two writes is
seen everywhere: the table's lock and the queue to the step thread lie between them.) No word means nothing: the lease
may be broken, or another lease has the place; the reader then asks the owner.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from typing import NamedTuple

WORD_BYTES = 8
COUNT = 1 << 12
"""Lease of epoch e has place e modulo this. Two leases that stand at once and meet are so many prefills apart."""


class LeaseMark(NamedTuple):
    """What stands for a lease in its owner's words."""

    epoch: int
    word: int


def lease_mark(engine_id: str, request_id: str, epoch: int) -> LeaseMark:
    """The word is a hash of all three (64 bits, never 0), so that no other engine's memory can show it."""
    digest = hashlib.blake2b(f"{engine_id}\0{request_id}\0{epoch}".encode(), digest_size=WORD_BYTES).digest()
    return LeaseMark(epoch, int.from_bytes(digest, "little") or 1)


class LeaseWords:
    """One engine's words, COUNT little-endian 64-bit integers from `address` on. LeaseTable writes under its lock.

    They lie in pages of their own: registered ones may be pinned, and a forked child may lose them.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self._closed = False
        self._words = (ctypes.c_uint64 * COUNT).from_buffer(mmap.mmap(-1, self.nbytes))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._words)

    @property
    def nbytes(self) -> int:
        return COUNT * WORD_BYTES

    def set(self, request_id: str, epoch: int) -> None:
        self._words[epoch % COUNT] = lease_mark(self.engine_id, request_id, epoch).word
        if self._closed:  # looked at after the write: close() may come in between, from another thread
            self._words[epoch % COUNT] = 0

    def clear(self, request_id: str, epoch: int) -> None:
        """Leaves the place alone when a later lease has it."""
        if self._words[epoch % COUNT] == lease_mark(self.engine_id, request_id, epoch).word:
            self._words[epoch % COUNT] = 0

    def close(self) -> None:
        """Before the arena's memory is given back: from now on no lease stands, whatever its table says."""
        self._closed = True
        ctypes.memset(self.address, 0, self.nbytes)

    def read(self, place: int) -> bytes:
        """Word `place` as a peer sees it."""
        return self._words[place].to_bytes(WORD_BYTES, "little")
