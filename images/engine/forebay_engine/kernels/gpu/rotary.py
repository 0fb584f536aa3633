"""From a layer's q, k and v to what attention reads: heads normalised and rotated, K and V in the paged arena."""

from __future__ import annotations

import torch
import triton.language as tl

from forebay_engine.kernels.gpu.launch import kernel, padded

_HEADS = 4
"""Of one program: 4 heads of 128 are 16 values for each thread of a warp."""


@kernel
def _rotate_and_store(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    arena_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    eps: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < heads + 2 * kv_heads) & (dim < HALF)
    at = qkv_ptr + (row * (heads + 2 * kv_heads) + head) * (2 * HALF) + dim
    stored = tl.load(at, mask=inside, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = head < heads
    is_value = head >= heads + kv_heads
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        low = tl.where(
            is_query,
            tl.load(q_norm_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32),
        )
        high = tl.where(
            is_query,
            tl.load(q_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32),
            tl.load(k_norm_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32),
        )
        first = tl.where(is_value, first, first * scale * low)
        second = tl.where(is_value, second, second * scale * high)
    cos = tl.load(cos_ptr + row * HALF + dim, mask=dim < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + dim, mask=dim < HALF, other=0.0)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    low_out = tl.where(is_value, first, rotated[0]).to(stored.dtype)
    high_out = tl.where(is_value, second, rotated[1]).to(stored.dtype)
    tl.store(at, low_out, mask=inside & is_query)
    tl.store(at + HALF, high_out, mask=inside & is_query)
    slot = tl.load(slots_ptr + row)
    kept = inside & (head >= heads) & (slot >= 0)
    kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
    place = (slot // BLOCK).to(tl.int64) * block_stride + kv_head * head_stride
    place += layer * (4 * BLOCK * HALF) + (slot % BLOCK) * (2 * HALF)
    place = arena_ptr + place + tl.where(is_value, 2 * BLOCK * HALF, 0) + dim
    tl.store(place, low_out, mask=kept)
    tl.store(place + HALF, high_out, mask=kept)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Rotate q in `qkv` in place; write rotated k, and v, into `layer` of the arena (k and v in `qkv` are left alone).

    `qkv` [n, heads + 2 * kv_heads, head_size] contiguous; `cos` and `sin` float32 [n, head_size / 2] of each row's
    position; `slots` int32 [n]: block * block_size + place in the block, below 0 for a row that is padding. `norms`:
    weights [head_size] of an RMS norm over each head of q and k before the rotation (Qwen3), with `eps`.
    """
    rows, all_heads, head_size = qkv.shape
    kv_heads, block_size = arena.shape[1], arena.shape[4]
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate_and_store[(rows, -(-all_heads // _HEADS))](
        qkv,
        cos,
        sin,
        slots,
        arena,
        q_norm,
        k_norm,
        eps,
        layer,
        arena.stride(0),
        arena.stride(1),
        heads,
        kv_heads,
        HALF=head_size // 2,
        HALF_PADDED=padded(head_size // 2),
        BLOCK=block_size,
        HEADS=_HEADS,
        NORM=norms is not None,
        num_warps=1,
    )
