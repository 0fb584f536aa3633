"""The kernels on the device against the references on the CPU: real models' shapes, borders, a long context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from engine.kernels.paged import Paged, normal
from engine.kernels.references import assert_near, rms_norm, rotate
from forebay_engine.kernels.gpu.activation import silu_mul
from forebay_engine.kernels.gpu.attention import SPAN, chunk_tiling
from forebay_engine.kernels.gpu.norm import add_rms_norm
from forebay_engine.kernels.gpu.rotary import rotate_and_store

NEAR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
SHAPES = [(9, 3, 64), (32, 8, 128), (28, 4, 128), (8, 1, 64), (4, 4, 96)]
"""SmolLM2-135M, Llama 3.1 8B, Qwen2 7B, and two that are nobody's."""


def check(device: str) -> int:
    """How many comparisons held; raises AssertionError at the first that doesn't."""
    done = 0
    for compare in _all(device):
        compare()
        done += 1
    return done


def _all(device: str) -> Iterator[Callable[[], None]]:
    """Each shape and dtype is compiled anew, a second or two: float16 gets one shape, the others all."""
    narrow = torch.bfloat16
    if device != "cpu" and torch.cuda.get_device_capability(device) < (8, 0):
        narrow = torch.float16
    for dtype, shapes in ((narrow, SHAPES), (torch.float32, SHAPES), (torch.float16, SHAPES[:1])):
        for rows, size in ((1, 576), (7, 4096), (3, 8191)):
            yield partial(_norm, rows, size, dtype, device)
        yield partial(_silu, dtype, device)
        for shape in shapes:
            for normed in (False, True):
                yield partial(_rotary, shape, normed, dtype, device)
            yield partial(_attention, shape, dtype, device)


def _norm(rows: int, size: int, dtype: Any, device: str) -> None:
    x, delta, weight = normal(rows, size, dtype=dtype), normal(rows, size, dtype=dtype, seed=1), normal(size, seed=2)
    weight = weight.to(dtype)
    kept = x.to(device, copy=True)
    found = add_rms_norm(kept, delta.to(device), weight.to(device), 1e-5)
    assert torch.equal(kept.cpu(), x + delta)
    assert_near(found.cpu(), rms_norm(x + delta, weight, 1e-5), NEAR[dtype])


def _silu(dtype: Any, device: str) -> None:
    both = normal(5, 2 * 14336, dtype=dtype)
    gate, up = both.float().chunk(2, -1)
    assert_near(silu_mul(both.to(device)).cpu(), gate * gate.sigmoid() * up, NEAR[dtype])


def _rotary(shape: tuple[int, int, int], normed: bool, dtype: Any, device: str) -> None:
    heads, kv_heads, size = shape
    rows, block = 5, 16
    qkv = normal(rows, heads + 2 * kv_heads, size, dtype=dtype)
    angles = torch.arange(rows)[:, None] * normal(size // 2).abs() * 100
    norms = (normal(size, dtype=dtype, seed=3), normal(size, dtype=dtype, seed=4)) if normed else None
    arena = torch.full((4, kv_heads, 3, 2, block, size), float("nan"), dtype=dtype, device=device)
    slots = [15, 16, 3 * block, -1, 47]
    there = qkv.to(device, copy=True)
    rotate_and_store(
        there,
        angles.cos().to(device),
        angles.sin().to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        arena,
        2,
        heads,
        None if norms is None else (norms[0].to(device), norms[1].to(device)),
        1e-6,
    )
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    assert_near(there[:, :heads].cpu(), rotate(q, angles.cos(), angles.sin()), NEAR[dtype])
    kept = [row for row in range(rows) if slots[row] >= 0]
    kv = torch.stack([arena[slots[row] // block, :, 2, :, slots[row] % block] for row in kept]).cpu()
    assert_near(kv[:, :, 0], rotate(k, angles.cos(), angles.sin())[kept], NEAR[dtype])
    assert torch.equal(kv[:, :, 1], v[kept])
    assert int(arena.isfinite().sum()) == len(kept) * 2 * kv_heads * size, "written beside the slots"


def _attention(shape: tuple[int, int, int], dtype: Any, device: str) -> None:
    tile = chunk_tiling(shape[0] // shape[1], shape[2], dtype.itemsize).queries
    lengths = [0, 15, 16, 31, 63, 64, 65, SPAN - 2, SPAN - 1, SPAN, 2 * SPAN - 1, 2 * SPAN, 4 * SPAN + 7]
    chunks = [(0, 2), (0, tile - 1), (15, tile), (17, tile + 1), (SPAN, 3 * tile), (0, 130)]
    sequences = [(n, 1) for n in lengths] + [(before, max(2, now)) for before, now in chunks]
    paged = Paged(shape, 16, sequences, dtype, device)
    assert_near(paged.found().cpu(), paged.wanted(), NEAR[dtype])
