"""What the GPU kernels must compute, in plain torch and float32. tests/engine/kernels and tests/gpu compare with it."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """`x` [n, heads, size], `cos` and `sin` [n, size / 2]: the first half of a head turns with the second."""
    low, high = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def attention(q: Any, k: Any, v: Any, position: int) -> Any:
    """`q` [rows, heads, size] at positions position, position + 1, ...; `k` and `v` [length, kv_heads, size].

    Scores are as they come: the engine has the scale in q.
    """
    rows, heads, _ = q.shape
    k, v = (part.float().repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q.float(), k)
    ahead = torch.arange(k.shape[0], device=q.device)[None] > torch.arange(rows, device=q.device)[:, None] + position
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(ahead, float("-inf")).softmax(-1), v)


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    """The largest deviation is below `tolerance` times the size of what is wanted; nothing is missing or no number."""
    assert found.shape == wanted.shape
    scale = wanted.float().square().mean().sqrt() + 1e-3
    error = float((found.float() - wanted.float()).abs().max() / scale)
    assert error < tolerance, f"off by {error:.2e}, allowed {tolerance:.0e}"
