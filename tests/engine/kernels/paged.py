"""Attention over a paged arena as a test sets it up: what the kernels find, and what the reference wants."""

from __future__ import annotations

import random
from typing import Any

import torch

from engine.kernels.references import attention
from forebay_engine.executor.step_inputs import Cut, pack
from forebay_engine.kernels.gpu.attention import SPAN, attend_chunks, attend_decodes, chunk_tiling, decode_tiling
from forebay_engine.types import SequenceStep


def normal(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Paged:
    """Sequences of (keys before, query tokens), their K and V scattered over an arena of garbage.

    `shape` is heads, KV heads, head size.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        block: int,
        sequences: list[tuple[int, int]],
        dtype: Any,
        device: str = "cpu",
    ) -> None:
        heads, kv_heads, size = shape
        lengths = [before + now for before, now in sequences]
        counts = [-(-length // block) for length in lengths]
        free = list(range(sum(counts) + 1))
        random.Random(len(free)).shuffle(free)
        self.layer = 1
        arena = torch.full((len(free), kv_heads, 2, 2, block, size), float("nan"), dtype=dtype)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.k = [normal(length, kv_heads, size, dtype=dtype, seed=i) for i, length in enumerate(lengths)]
        self.v = [normal(length, kv_heads, size, dtype=dtype, seed=100 + i) for i, length in enumerate(lengths)]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            for at in range(k.shape[0]):
                arena[table[at // block], :, self.layer, 0, at % block] = k[at]
                arena[table[at // block], :, self.layer, 1, at % block] = v[at]
        self.arena = arena.to(device)
        rows = sum(now for _, now in sequences)
        self.qkv = normal(rows, heads + 2 * kv_heads, size, dtype=dtype, seed=7)
        self.qkv[:, heads:] = float("nan")  # K and V come from the arena
        self.qkv[:, :heads] *= size**-0.5 * 2
        self.qkv = self.qkv.to(device)
        self.steps = [
            SequenceStep(str(i), [0] * now, before, self.tables[i], None) for i, (before, now) in enumerate(sequences)
        ]
        self.shape = shape
        self.block = block
        self.dtype = dtype
        self.device = device

    def found(self, span: int = SPAN) -> Any:
        """By the kernels."""
        heads, kv_heads, size = self.shape
        sizes = (heads // kv_heads, size, self.dtype.itemsize)
        chunk = chunk_tiling(*sizes)
        inputs = pack(self.steps, self.block, Cut(chunk.queries, span))
        names = ("tables", "decode_tiles", "joins", "chunk_tiles")
        tables, decodes, joins, chunks = (torch.from_numpy(inputs.part(name)).to(self.device) for name in names)
        out = torch.full((self.qkv.shape[0], heads, size), float("nan"), dtype=self.dtype, device=self.device)
        common = (out, self.qkv, self.arena, self.layer, tables)
        if joins.shape[0]:
            attend_decodes(*common, decodes, joins, decode_tiling(*sizes), span=span)
        if chunks.shape[0]:
            attend_chunks(*common, chunks, chunk)
        return out

    def wanted(self) -> Any:
        """By the reference, on the CPU."""
        row, parts = 0, []
        for i, step in enumerate(self.steps):
            q = self.qkv.cpu()[row : row + len(step.token_ids), : self.shape[0]]
            parts.append(attention(q, self.k[i], self.v[i], step.start))
            row += len(step.token_ids)
        return torch.cat(parts)
