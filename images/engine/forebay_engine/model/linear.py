"""Matrix multiplication by weights, in the layout that the device multiplies fastest.

On a CPU with oneDNN a weight is reordered once into oneDNN's blocked layout. Of the layouts torch offers (F.linear,
transposed, packed) the packed one was fastest for every shape of SmolLM2 from 4 rows up, in float32 and bfloat16. One
or two rows take longer than four, so callers pad (`min_rows`). A packed product costs 14 us to call, ten times an
elementwise operation: so matrices that share an input are one.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

PACKED_MIN_ROWS = 4
_PACK_ROWS_HINT = 8
"""oneDNN picks the blocking for this many rows; blockings for one row are up to 60 % slower at eight."""


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, [n, outputs], for x [n, inputs]."""


class PlainLinear:
    """The weight as it is: GPUs, and CPUs without oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The weight in oneDNN's blocked layout; a private copy, twice as fast at eight rows as the mapped original."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or packs_bfloat16()


def packs_bfloat16() -> bool:
    """oneDNN wants AVX-512 or AVX-NE-CONVERT for it and raises without; F.linear multiplies it on every CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`weight` [outputs, inputs] on the device and in the dtype it is to be used in."""
    return (PackedLinear if can_pack(weight.device, weight.dtype) else PlainLinear)(weight, bias)


def min_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows below which padding with more rows is free or faster."""
    return PACKED_MIN_ROWS if can_pack(device, dtype) else 1
