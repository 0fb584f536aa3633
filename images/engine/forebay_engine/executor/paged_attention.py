"""Attention over a paged KV arena for ragged batches, made of torch operations.

A step's sequences are split in two kinds. Those with one token (decode) are batched: blocks gathered into a dense,
padded [batch, kv_heads, length, head_size], one scaled_dot_product_attention, whose query rows are the heads that share
a KV head, so that K and V are read once. Those with more (prefill chunks) go one by one, in tiles of queries that only
meet the keys up to the tile's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from forebay_engine.kv.arena import ArenaLayout
from forebay_engine.types import SequenceStep

_MAX_GATHER_BYTES = 8 * 1024 * 1024
"""Of one layer's K and V in one batch: more only leaves the cache before it is read."""

_MAX_PADDING = 1.25
"""Longest over shortest length (in blocks) of one decode batch."""

_TILE_ROWS = 64
_TILE_BYTES = 16 * 1024 * 1024
"""Of one tile's scores, which bounds the tile's rows at long contexts."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows first .. end - 1 of the step, and where their K and V lie."""

    first: int
    end: int
    gather: tuple[torch.Tensor, ...]
    """By layer, int64: rows of the arena seen as [-1, block_size * head_size], in order K|V, sequence, head, block."""

    lengths: list[int]
    padded: int
    mask: torch.Tensor | None
    """Decode batches of unequal lengths: [batch, 1, 1, padded], 0 or -inf."""


class PagedAttention:
    """Plans steps over one arena tensor (executor/arena.py). Keeps scratch memory between steps."""

    def __init__(self, arena: torch.Tensor, layout: ArenaLayout, heads: int) -> None:
        self.layout = layout
        self.heads = heads
        self.group = heads // layout.kv_heads
        self.device = arena.device
        self.dtype = arena.dtype
        self.scale = layout.head_size**-0.5
        self.token_rows = arena.view(-1, layout.head_size)
        self.block_rows = arena.view(-1, layout.block_size * layout.head_size)
        layers, device = torch.arange(layout.layers, device=self.device), self.device
        self._kv = torch.arange(2, device=device)
        self._head = torch.arange(layout.kv_heads, device=device)
        self._layer_blocks = (layers * 2)[:, None]
        self._layer_tokens = (layers * 2 * layout.block_size)[:, None]
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        tile = torch.full((_TILE_ROWS, _TILE_ROWS), float("-inf"), dtype=torch.float32, device=device)
        self.tile_mask = tile.triu(1)

    def plan(self, steps: Sequence[SequenceStep]) -> tuple[list[int], StepAttention]:
        """Order of the steps' rows in the batch (indices into `steps`), and the attention of that batch."""
        decodes = [i for i, step in enumerate(steps) if len(step.token_ids) == 1]
        chunks = [i for i, step in enumerate(steps) if len(step.token_ids) > 1]
        decodes.sort(key=lambda i: steps[i].start)
        order = decodes + chunks
        spans, row = [], 0
        for batch in self._batches(steps, decodes):
            spans.append(self._span(row, [steps[i] for i in batch]))
            row += len(batch)
        for i in chunks:
            spans.append(self._span(row, [steps[i]]))
            row += len(steps[i].token_ids)
        return order, StepAttention(self, spans, self._write_rows([steps[i] for i in order]))

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of that name, overwritten by its next use."""
        size = 1
        for n in shape:
            size *= n
        have = self._scratch.get((name, dtype))
        if have is None or have.shape[0] < size:
            have = self._scratch[name, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return have[:size].view(shape)

    def _batches(self, steps: Sequence[SequenceStep], decodes: list[int]) -> list[list[int]]:
        """Decode sequences, sorted by length, cut so that padding and gathered bytes stay bounded."""
        layout = self.layout
        per_block = 2 * layout.kv_heads * layout.block_size * layout.head_size * layout.itemsize
        batches: list[list[int]] = []
        shortest = 0
        for i in decodes:
            blocks = self._blocks_of(steps[i])
            fits = bool(batches) and blocks <= shortest * _MAX_PADDING
            if fits and (len(batches[-1]) + 1) * blocks * per_block <= _MAX_GATHER_BYTES:
                batches[-1].append(i)
            else:
                batches.append([i])
                shortest = blocks
        return batches

    def _blocks_of(self, step: SequenceStep) -> int:
        return -(-(step.start + len(step.token_ids)) // self.layout.block_size)

    def _span(self, first: int, steps: list[SequenceStep]) -> _Span:
        layout = self.layout
        blocks = [self._blocks_of(step) for step in steps]
        most = max(blocks)
        # Padding repeats a sequence's own last block: masked, and never another request's memory.
        tables = [
            step.block_table[:n] + [step.block_table[n - 1]] * (most - n) for step, n in zip(steps, blocks, strict=True)
        ]
        table = torch.tensor(tables, device=self.device)
        rows = (table[None, :, None, :] * layout.kv_heads + self._head[None, None, :, None]) * (2 * layout.layers)
        rows = (rows + self._kv[:, None, None, None]).reshape(1, -1)
        lengths = [step.start + len(step.token_ids) for step in steps]
        padded = most * layout.block_size
        mask = None
        if min(lengths) != max(lengths):
            seen = (
                torch.arange(padded, device=self.device)[None, :] < torch.tensor(lengths, device=self.device)[:, None]
            )
            mask = torch.zeros(len(steps), 1, 1, padded, dtype=self.dtype, device=self.device)
            mask.masked_fill_(~seen[:, None, None, :], float("-inf"))
        end = first + sum(len(step.token_ids) for step in steps)
        return _Span(first, end, (rows + self._layer_blocks).unbind(), lengths, padded, mask)

    def _write_rows(self, steps: list[SequenceStep]) -> tuple[torch.Tensor, ...]:
        """By layer, int64: rows of the arena seen as [-1, head_size], in order token, K|V, head."""
        size = self.layout.block_size
        blocks, slots = [], []
        for step in steps:
            for position in range(step.start, step.start + len(step.token_ids)):
                blocks.append(step.block_table[position // size])
                slots.append(position % size)
        block = torch.tensor(blocks, device=self.device)[:, None, None]
        slot = torch.tensor(slots, device=self.device)[:, None, None]
        rows = (block * self.layout.kv_heads + self._head[None, None, :]) * (2 * self.layout.layers)
        rows = (rows + self._kv[None, :, None]) * size + slot
        return (rows.reshape(1, -1) + self._layer_tokens).unbind()


class StepAttention:
    """The attention of one planned step: model/network.py's Attention."""

    def __init__(self, owner: PagedAttention, spans: list[_Span], write: tuple[torch.Tensor, ...]) -> None:
        self._owner = owner
        self._spans = spans
        self._write = write
        self._tokens = spans[-1].end

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        owner = self._owner
        rows, head_size = qkv.shape[0], owner.layout.head_size
        new = qkv[: self._tokens, owner.heads :].reshape(-1, head_size)
        owner.token_rows.index_copy_(0, self._write[layer], new)
        out = owner.scratch("out", (rows, owner.heads, head_size), owner.dtype)
        if layer == 0 and rows > self._tokens:
            out[self._tokens :].zero_()  # and stays so: no layer writes there
        for span in self._spans:
            kv = self._gather(layer, span)
            q, into = qkv[span.first : span.end, : owner.heads], out[span.first : span.end]
            if span.end - span.first == len(span.lengths):
                self._decode(span, kv, q, into)
            elif owner.device.type == "cpu":
                self._chunk_tiled(span, kv, q, into)
            else:
                self._chunk_fused(span, kv, q, into)
        return out.view(rows, -1)

    def _gather(self, layer: int, span: _Span) -> torch.Tensor:
        """[2, batch, kv_heads, padded, head_size]."""
        owner, layout = self._owner, self._owner.layout
        index = span.gather[layer]
        kv = owner.scratch("kv", (index.shape[0], layout.block_size * layout.head_size), owner.dtype)
        torch.index_select(owner.block_rows, 0, index, out=kv)
        return kv.view(2, len(span.lengths), layout.kv_heads, span.padded, layout.head_size)

    def _decode(self, span: _Span, kv: torch.Tensor, q: torch.Tensor, into: torch.Tensor) -> None:
        owner = self._owner
        if span.mask is None:
            kv = kv[:, :, :, : span.lengths[0]]
        grouped = q.view(q.shape[0], owner.layout.kv_heads, owner.group, owner.layout.head_size)
        out = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=span.mask)
        into.copy_(out.view(into.shape) if out.is_contiguous() else out.reshape(into.shape))

    def _chunk_fused(self, span: _Span, kv: torch.Tensor, q: torch.Tensor, into: torch.Tensor) -> None:
        """A prefill chunk by the device's own causal kernel, aligned to the context's end."""
        length = span.lengths[0]
        k, v = kv[0, :, :, :length], kv[1, :, :, :length]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=causal_lower_right(q.shape[0], length), enable_gqa=True
        )
        into.copy_(out[0].transpose(0, 1))

    def _chunk_tiled(self, span: _Span, kv: torch.Tensor, q: torch.Tensor, into: torch.Tensor) -> None:
        """A prefill chunk on a CPU: torch's flash kernel there is up to 1.6 times slower than its own matrix products.

        Scores and sums are float32 whatever the dtype.
        """
        owner, layout = self._owner, self._owner.layout
        count, length = q.shape[0], span.lengths[0]
        heads, group, size = layout.kv_heads, owner.group, layout.head_size
        queries = owner.scratch("q", (heads, group, count, size), torch.float32)
        queries.copy_(q.view(count, heads, group, size).permute(1, 2, 0, 3))
        queries.mul_(owner.scale)
        keys = kv[0, 0, :, :length].float().transpose(1, 2)
        values = kv[1, 0, :, :length].float()
        grouped_out = into.view(count, heads, group, size)
        start = length - count
        tile = max(1, min(_TILE_ROWS, _TILE_BYTES // (owner.heads * length * 4)))
        for first, end in pairwise((*range(0, count, tile), count)):
            rows, seen = end - first, start + end
            scores = owner.scratch("scores", (heads, group * rows, seen), torch.float32)
            weights = owner.scratch("weights", (heads, group * rows, seen), torch.float32)
            torch.bmm(queries[:, :, first:end].reshape(heads, group * rows, size), keys[:, :, :seen], out=scores)
            scores.view(heads, group, rows, seen)[..., start + first :].add_(owner.tile_mask[:rows, :rows])
            torch.softmax(scores, -1, out=weights)
            out = torch.bmm(weights, values[:, :seen])
            grouped_out[first:end] = out.view(heads, group, rows, size).permute(2, 0, 1, 3)
