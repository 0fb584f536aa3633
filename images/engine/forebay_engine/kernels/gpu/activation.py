"""The gate of a Llama MLP."""

from __future__ import annotations

import torch
import triton.language as tl

from forebay_engine.kernels.gpu.launch import kernel, padded

_MOST = 1024
"""Columns of one program."""


@kernel
def _silu_mul(gate_up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, WIDTH: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < size
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * size + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [n, size], of `gate_up` [n, 2 * size] contiguous, gate first; computed in float32."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    width = min(_MOST, padded(size))
    _silu_mul[(rows, -(-size // width))](gate_up, out, size, WIDTH=width, num_warps=4)
    return out
