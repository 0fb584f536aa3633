"""The KV arena's layout: one buffer, `num_blocks` contiguous blocks; pure arithmetic, no memory here."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUT = "head,layer,kv,token,dim"
"""Order inside a block, outermost first, so that a tensor-parallel rank's heads are one contiguous share."""


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Shape of one block: [kv_heads, layers, 2 (K, V), block_size, head_size] elements of `itemsize` bytes."""

    layers: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    itemsize: int

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.kv_heads, self.layers, 2, self.block_size, self.head_size)

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * self.layers * 2 * self.head_size * self.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_in(self, memory_bytes: int) -> int:
        """How many blocks fit; the caller refuses a count too small to serve one request."""
        return memory_bytes // self.block_bytes
