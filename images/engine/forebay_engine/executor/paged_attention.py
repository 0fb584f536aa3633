"""Attention over a paged KV arena for ragged batches, made of torch operations.

A step's sequences are split in two kinds. Those with one token (decode) are batched: blocks gathered into a dense,
padded [batch, kv_heads, length, head_size], one scaled_dot_product_attention, whose query rows are the heads that share
a KV head, so that K and V are read once. Those with more (prefill chunks) go one by one, in tiles of queries that only
meet the keys up to the tile's end. Queries come scaled by head_size^-0.5 (model/network.py).
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

_PRODUCTS_FROM_KEYS = 256
"""bfloat16 decode on a CPU: from so many keys on two matrix products beat the flash kernel (by 2 at 1,024)."""

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


@dataclass(frozen=True, slots=True)
class _SpanViews:
    """A span's memory, the same in every layer. Spans share `rows`: each is done before the next begins."""

    rows: torch.Tensor
    """What `gather` fills: [rows, block_size * head_size]."""

    k: torch.Tensor
    """[batch, kv_heads, length, head_size], a view of `rows`."""

    v: torch.Tensor
    all_keys: torch.Tensor
    """[batch * kv_heads, head_size, padded length]: whole, since bfloat16 products copy a K that is cut (4 times the
    product's own time)."""

    all_values: torch.Tensor
    out: torch.Tensor
    """[span's rows, kv_heads, group, head_size]."""

    q_strides: tuple[int, int, int, int]
    """Of the span's queries inside the step's qkv, shaped like `out`."""

    keys: int
    """Sequences times their length."""


class PagedAttention:
    """Plans steps over one arena tensor (executor/arena.py). Keeps scratch memory between steps."""

    def __init__(self, arena: torch.Tensor, layout: ArenaLayout, heads: int) -> None:
        self.layout = layout
        self.heads = heads
        self.group = heads // layout.kv_heads
        self.device = arena.device
        self.dtype = arena.dtype
        self.token_rows = arena.view(-1, layout.head_size)
        self.block_rows = arena.view(-1, layout.block_size * layout.head_size)
        layers, device = torch.arange(layout.layers, device=self.device), self.device
        self._kv = torch.arange(2, device=device)
        self._head = torch.arange(layout.kv_heads, device=device)
        self._layer_blocks = (layers * 2)[:, None]
        self._layer_tokens = (layers * 2 * layout.block_size)[:, None]
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        tile = torch.full((_TILE_ROWS, _TILE_ROWS), float("-inf"), dtype=self.dtype, device=device)
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
        self._new_shape = (self._tokens, 2 * owner.layout.kv_heads, owner.layout.head_size)
        self._views: list[_SpanViews] = []
        self._out = torch.empty(0)

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        owner = self._owner
        if layer == 0:
            self._prepare(qkv.shape[0])
        # as_strided is one call where slicing and reshaping are three.
        new = qkv.as_strided(self._new_shape, qkv.stride(), owner.heads * owner.layout.head_size)
        owner.token_rows.index_copy_(0, self._write[layer], new.reshape(-1, owner.layout.head_size))
        for span, views in zip(self._spans, self._views, strict=True):
            torch.index_select(owner.block_rows, 0, span.gather[layer], out=views.rows)
            q = qkv.as_strided(views.out.shape, views.q_strides, span.first * qkv.stride(0))
            if span.end - span.first == len(span.lengths):
                self._decode(span, views, q)
            elif owner.device.type == "cpu":
                self._chunk_tiled(views, q)
            else:
                self._chunk_fused(views, q)
        return self._out

    def _prepare(self, rows: int) -> None:
        """Make the views that all layers share: at one row a view costs as much as the work on it."""
        owner, layout = self._owner, self._owner.layout
        heads, size = layout.kv_heads, layout.head_size
        out = owner.scratch("out", (rows, heads, owner.group, size), owner.dtype)
        out[self._tokens :].zero_()  # padding, and stays so: no layer writes there
        self._out = out.view(rows, -1)
        for span in self._spans:
            batch = len(span.lengths)
            flat = owner.scratch("kv", (span.gather[0].shape[0], layout.block_size * size), owner.dtype)
            seen = span.lengths[0] if span.mask is None else span.padded
            whole = flat.view(2, batch * heads, span.padded, size)
            kv = whole.view(2, batch, heads, span.padded, size)[:, :, :, :seen]
            q_strides = ((owner.heads + 2 * heads) * size, owner.group * size, size, 1)
            self._views.append(
                _SpanViews(
                    rows=flat,
                    k=kv[0],
                    v=kv[1],
                    all_keys=whole[0].transpose(1, 2),
                    all_values=whole[1],
                    out=out[span.first : span.end],
                    q_strides=q_strides,
                    keys=batch * seen,
                )
            )

    def _decode(self, span: _Span, views: _SpanViews, q: torch.Tensor) -> None:
        owner = self._owner
        if owner.device.type == "cpu" and (owner.dtype == torch.float32 or views.keys >= _PRODUCTS_FROM_KEYS):
            self._decode_by_products(span, views, q)
        else:
            views.out.copy_(F.scaled_dot_product_attention(q, views.k, views.v, attn_mask=span.mask, scale=1.0))

    def _decode_by_products(self, span: _Span, views: _SpanViews, q: torch.Tensor) -> None:
        """On a CPU the plain products are up to twice as fast as the flash kernel, which repacks bfloat16 K and V."""
        owner = self._owner
        batch, heads, group, size = q.shape
        flat, length = batch * heads, span.padded
        scores = owner.scratch("scores", (flat, group, length), owner.dtype)
        torch.bmm(q.reshape(flat, group, size), views.all_keys, out=scores)
        if span.mask is not None:
            scores.view(batch, heads, group, length).add_(span.mask)
        elif span.lengths[0] < length:
            scores[:, :, span.lengths[0] :].fill_(float("-inf"))
        weights = owner.scratch("weights", (flat, group, length), owner.dtype)
        torch.softmax(scores, -1, out=weights)
        torch.bmm(weights, views.all_values, out=views.out.view(flat, group, size))

    def _chunk_fused(self, views: _SpanViews, q: torch.Tensor) -> None:
        """A prefill chunk by the device's own causal kernel, aligned to the context's end."""
        mask = causal_lower_right(q.shape[0], views.k.shape[2])
        out = F.scaled_dot_product_attention(
            q.flatten(1, 2).transpose(0, 1)[None], views.k, views.v, attn_mask=mask, scale=1.0, enable_gqa=True
        )
        views.out.copy_(out[0].transpose(0, 1).view(views.out.shape))

    def _chunk_tiled(self, views: _SpanViews, q: torch.Tensor) -> None:
        """A prefill chunk on a CPU: torch's flash kernel there is up to twice as slow as its own matrix products."""
        owner = self._owner
        count, heads, group, size = views.out.shape
        length = views.k.shape[2]
        queries = owner.scratch("q", (heads, group, count, size), owner.dtype)
        queries.copy_(q.permute(1, 2, 0, 3))
        k, v = views.k[0], views.v[0]
        start = length - count
        tile = max(1, min(_TILE_ROWS, _TILE_BYTES // (owner.heads * length * 4)))
        for first, end in pairwise((*range(0, count, tile), count)):
            rows, seen = end - first, start + end
            shape = (heads, group * rows, seen)
            scores, weights = owner.scratch("scores", shape, owner.dtype), owner.scratch("weights", shape, owner.dtype)
            tile_queries = queries[:, :, first:end].reshape(heads, group * rows, size)
            keys = k[:, :seen] if owner.dtype == torch.float32 else k[:, :seen].contiguous()  # see _SpanViews
            torch.bmm(tile_queries, keys.transpose(1, 2), out=scores)
            scores.view(heads, group, rows, seen)[..., start + first :].add_(owner.tile_mask[:rows, :rows])
            torch.softmax(scores, -1, out=weights)
            out = torch.bmm(weights, v[:, :seen])
            views.out[first:end] = out.view(heads, group, rows, size).permute(2, 0, 1, 3)
