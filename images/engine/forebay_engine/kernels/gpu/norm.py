"""Residual addition and RMS normalisation in one pass over a row."""

from __future__ import annotations

import torch
import triton.language as tl

from forebay_engine.kernels.gpu.launch import kernel, padded, warps_for


@kernel
def _add_rms_norm(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(delta_ptr + row + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at, (wide * scale * weight).to(x.dtype), mask=inside)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x += delta, in place; then x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), a new tensor like x.

    `x` and `delta` [n, size] contiguous, `weight` [size]. Sums are float32; x is rounded to its dtype before it is
    normalised, as it is when the two are done apart.
    """
    rows, size = x.shape
    out = torch.empty_like(x)
    _add_rms_norm[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        eps,
        SIZE=size,
        PADDED=padded(size),
        ADD=delta is not None,
        num_warps=warps_for(size),
    )
    return out
