"""A KV arena with known content, for both transports: real memory for NIXL, 16-byte tags for the twin."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from forebay_engine.kv.lease_words import LeaseWords
from forebay_engine.transfer.base import Transport
from forebay_engine.transfer.nixl import NixlTransport
from forebay_engine.transfer.simulated import SimulatedTransport
from forebay_wire.messages import Compatibility

BLOCK_BYTES = 64 * 1024
BLOCK_SIZE = 16


def compatibility(dtype: str = "float32") -> Compatibility:
    return Compatibility(
        engine_version="1",
        model="m",
        dtype=dtype,
        layers=4,
        kv_heads=2,
        head_size=64,
        block_size=BLOCK_SIZE,
        layout="x",
    )


def _seeded(seed: int, block: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{block}".encode(), digest_size=16).digest()


class Arena:
    """Block b filled with `seed` holds bytes that depend on both."""

    def __init__(self, kind: str, num_blocks: int, block_bytes: int = BLOCK_BYTES, bandwidth: float = 1e9) -> None:
        self.kind = kind
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.bandwidth = bandwidth
        width = 16 if kind == "simulated" else block_bytes
        self.blocks = np.zeros((num_blocks, width), dtype=np.uint8)
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        return 0 if self.kind == "simulated" else int(self.blocks.ctypes.data)

    def fill(self, seed: int, blocks: Iterable[int] | None = None) -> None:
        with self._lock:
            for block in range(self.num_blocks) if blocks is None else blocks:
                self.blocks[block] = np.frombuffer(self.expected(seed, block), dtype=np.uint8)

    def expected(self, seed: int, block: int) -> bytes:
        return _seeded(seed, block) * (self.blocks.shape[1] // 16)

    def holds(self, block: int, seed: int, source_block: int) -> bool:
        return self.blocks[block].tobytes() == self.expected(seed, source_block)

    def read_tags(self, blocks: Sequence[int]) -> bytes:
        with self._lock:
            return b"".join(self.blocks[block].tobytes() for block in blocks)

    def write_tags(self, blocks: Sequence[int], data: bytes) -> None:
        with self._lock:
            for i, block in enumerate(blocks):
                self.blocks[block] = np.frombuffer(data[16 * i : 16 * i + 16], dtype=np.uint8)

    def transport(self, words: LeaseWords | None = None) -> Transport:
        """`kind` is simulated, or a NIXL transport setting (auto, tcp)."""
        if self.kind == "simulated":
            return SimulatedTransport(
                host="127.0.0.1",
                block_bytes=self.block_bytes,
                num_blocks=self.num_blocks,
                read_tags=self.read_tags,
                write_tags=self.write_tags,
                transfer_seconds=lambda volume: volume / self.bandwidth,
                words=words,
            )
        return NixlTransport(
            address=self.address,
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            transport=self.kind,
            words=words,
            keepalive=self.blocks,
        )
