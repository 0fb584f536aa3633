"""Attention over the paged arena: one kernel for decode tokens and for prefill chunks.

A program takes a tile of one sequence's queries, with all query heads that share a KV head, and a span of that
sequence's keys, and goes over them with an online softmax (Dao et al. 2022, FlashAttention), reading K and V through
the block table. A decode token is a tile of one query. Its keys are cut into spans of SPAN, each a program of its own,
so that one long context fills the GPU too (flash decoding); a second kernel joins the spans. Spans are cut at fixed
places, not by what else is in the batch, so a token's attention does not depend on it; and only those that exist have
programs, so a long context beside short ones costs no more than it must.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from forebay_engine.kernels.gpu.launch import MIN_PRODUCT, kernel, padded, products_float32

SPAN = 512
"""Keys of one program in decode."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one program's work."""

    queries: int
    """Query tokens."""

    rows: int
    """Of the product: queries times the heads that share a KV head, padded."""

    keys: int
    """At a time."""

    warps: int
    stages: int
    """Of loads in flight: each holds `keys` rows of K and V in shared memory."""


def decode_tiling(group: int, head_size: int, itemsize: int) -> Tiling:
    """One query token. `group` query heads share a KV head."""
    narrow = itemsize > 2 or head_size > 128
    return Tiling(1, padded(group, MIN_PRODUCT), 32 if narrow else 64, 4, 2 if narrow else 3)


def chunk_tiling(group: int, head_size: int, itemsize: int) -> Tiling:
    """As many query tokens as make a full product; with less than 100 KB of shared memory, which every GPU has."""
    narrow = itemsize > 2 or head_size > 128
    rows = max(32 if narrow else 128, padded(group, MIN_PRODUCT))
    return Tiling(max(1, rows // group), rows, 32 if narrow else 64, 4 if rows * padded(head_size) <= 8192 else 8, 2)


@kernel
def _paged_attention(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    qkv_ptr: tl.tensor,
    arena_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    PRODUCTS_FLOAT32: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    table_ptr = tables_ptr + tl.load(tiles_ptr + tile * 4)
    first_row = tl.load(tiles_ptr + tile * 4 + 1)
    third = tl.load(tiles_ptr + tile * 4 + 2)
    position = tl.load(tiles_ptr + tile * 4 + 3)
    if SPAN > 0:
        begin = third
        count = tl.where(position >= 0, 1, 0)
        end = tl.minimum(position + 1, begin + SPAN)
    else:
        begin = 0
        count = third
        end = position + count
    row = tl.arange(0, ROWS)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = query < count
    dim = tl.arange(0, HEAD_PADDED)
    whole = dim < HEAD
    token_row = (first_row + query).to(tl.int64)
    q = tl.load(
        qkv_ptr + (token_row * (heads + 2 * kv_heads) + head)[:, None] * HEAD + dim[None, :],
        mask=real[:, None] & whole[None, :],
        other=0.0,
    )
    dtype = q.dtype
    if PRODUCTS_FLOAT32:
        q = q.to(tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    layer_base = arena_ptr + kv_head.to(tl.int64) * head_stride + layer.to(tl.int64) * (2 * BLOCK * HEAD)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(table_ptr + key // BLOCK, mask=inside, other=0)
        place = layer_base + block.to(tl.int64) * block_stride + (key % BLOCK) * HEAD
        k = tl.load(place[None, :] + dim[:, None], mask=inside[None, :] & whole[:, None], other=0.0)
        v = tl.load(place[:, None] + BLOCK * HEAD + dim[None, :], mask=inside[:, None] & whole[None, :], other=0.0)
        if PRODUCTS_FLOAT32:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # In powers of two, which is what the hardware has: the factor is log2(e).
        scores = tl.dot(q, k, input_precision="ieee") * 1.4426950408889634
        seen = inside[None, :] & (key[None, :] <= (position + query)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        # A row whose keys all lie ahead has seen nothing: -inf minus -inf would be no number.
        base = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(dtype)
        if PRODUCTS_FLOAT32:
            weights = weights.to(tl.float32)
        acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = above
    total = tl.where(total == 0.0, 1.0, total)  # padding
    result = acc / total[:, None]
    stored = real[:, None] & whole[None, :]
    if SPLIT:
        at = tile.to(tl.int64) * heads + head
        tl.store(partial_ptr + at[:, None] * HEAD + dim[None, :], result, mask=stored)
        tl.store(weight_ptr + at, highest + tl.log2(total), mask=real)
    else:
        at = token_row * heads + head
        tl.store(out_ptr + at[:, None] * HEAD + dim[None, :], result.to(dtype), mask=stored)


@kernel
def _join_spans(
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    joins_ptr: tl.tensor,
    heads: tl.tensor,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
) -> None:
    join = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(joins_ptr + join * 4).to(tl.int64)
    first = tl.load(joins_ptr + join * 4 + 1).to(tl.int64)
    spans = tl.load(joins_ptr + join * 4 + 2)
    dim = tl.arange(0, HEAD_PADDED)
    whole = (dim < HEAD) & (spans > 0)
    highest = tl.load(weight_ptr + first * heads + head)
    total = 1.0
    acc = tl.load(partial_ptr + (first * heads + head) * HEAD + dim, mask=whole, other=0.0)
    for span in range(1, spans):
        at = (first + span) * heads + head
        weight = tl.load(weight_ptr + at)
        part = tl.load(partial_ptr + at * HEAD + dim, mask=whole, other=0.0)
        above = tl.maximum(highest, weight)
        shrink = tl.exp2(highest - above)
        grow = tl.exp2(weight - above)
        acc = acc * shrink + part * grow
        total = total * shrink + grow
        highest = above
    at = out_ptr + (row * heads + head) * HEAD + dim
    tl.store(at, (acc / total).to(out_ptr.dtype.element_ty), mask=whole)


def attend_decodes(
    out: torch.Tensor,
    qkv: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    joins: torch.Tensor,
    tiling: Tiling,
    *,
    span: int = SPAN,
) -> None:
    """Attention of single tokens, written to their rows of `out` [n, heads, head_size].

    `qkv` [n, heads + 2 * kv_heads, head_size] contiguous, q rotated and scaled by head_size^-0.5; K and V are read
    from `arena` [blocks, kv_heads, layers, 2, block_size, head_size] only. `tables` int32: block numbers. `tiles` int32
    [t, 4], one for each span of each token: where the sequence's blocks begin in `tables`, the token's row, the span's
    first key, the token's position (-1: padding); it sees the keys up to that. `joins` int32 [d, 4], one for each
    token: its row, its first tile, how many tiles (0: padding), unused. As many tiles as joins: each token has one.
    """
    if tiles.shape[0] <= joins.shape[0]:
        _attend(out, qkv, arena, layer, tables, tiles, tiling, span, None)
        return
    heads, head_size = out.shape[1], out.shape[2]
    partial = torch.empty(tiles.shape[0], heads, head_size, dtype=torch.float32, device=out.device)
    weight = torch.empty(tiles.shape[0], heads, dtype=torch.float32, device=out.device)
    _attend(out, qkv, arena, layer, tables, tiles, tiling, span, (partial, weight))
    _join_spans[(joins.shape[0], heads)](
        out, partial, weight, joins, heads, HEAD=head_size, HEAD_PADDED=padded(head_size), num_warps=1
    )


def attend_chunks(
    out: torch.Tensor,
    qkv: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Attention of prefill chunks; arguments as of attend_decodes.

    `tiles` int32 [t, 4]: where the sequence's blocks begin in `tables`, first row, rows (at most tiling.queries),
    position of the first row. A row sees the keys up to its own position.
    """
    _attend(out, qkv, arena, layer, tables, tiles, tiling, 0, None)


def _attend(
    out: torch.Tensor,
    qkv: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    tiling: Tiling,
    span: int,
    parts: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    heads, head_size = out.shape[1], out.shape[2]
    kv_heads, block_size = arena.shape[1], arena.shape[4]
    partial, weight = parts or (out, out)
    _paged_attention[(tiles.shape[0], kv_heads)](
        out,
        partial,
        weight,
        qkv,
        arena,
        tables,
        tiles,
        layer,
        arena.stride(0),
        arena.stride(1),
        heads,
        kv_heads,
        GROUP=heads // kv_heads,
        HEAD=head_size,
        HEAD_PADDED=padded(head_size, MIN_PRODUCT),
        BLOCK=block_size,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        SPAN=span,
        SPLIT=parts is not None,
        PRODUCTS_FLOAT32=products_float32(out.dtype),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
