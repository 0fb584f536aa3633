"""Matrix multiplication by weights, in the layout that the device multiplies fastest.

On a CPU with oneDNN a weight is reordered once into oneDNN's blocked layout and used by its fused kernels. Of the
layouts torch offers (F.linear, transposed, packed) the packed one was fastest for every shape of SmolLM2 from 4 rows
up, in float32 and bfloat16. One or two rows take longer than four, so callers pad (`min_rows`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

PACKED_MIN_ROWS = 4
_PACK_ROWS_HINT = 8
"""oneDNN picks the blocking for this many rows; blockings for one row are up to 60 % slower at eight."""


class Linear(Protocol):
    """y = x W^T + b, for x [n, inputs], W [outputs, inputs]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product added to `residual`, as a new tensor or in `residual`'s place."""


class GatedMLP(Protocol):
    """silu(x Wg^T) * (x Wu^T)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """The weight as it is: GPUs, and CPUs without oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, self._weight, self._bias))


class PlainGatedMLP:
    """Gate and up in one product."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> None:
        bias = torch.cat((gate_bias, up_bias)) if gate_bias is not None and up_bias is not None else None
        self._both = PlainLinear(torch.cat((gate, up)), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._both(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class PackedLinear:
    """The weight in oneDNN's blocked layout; a private copy, twice as fast at eight rows as the mapped original."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._run_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run_binary(x, residual, self._weight, self._bias, "add")
        return y

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(y), applied while the product is still in registers."""
        y: torch.Tensor = self._run(x, self._weight, self._bias, "swish", [], "")
        return y

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """y * factor, likewise."""
        y: torch.Tensor = self._run_binary(x, factor, self._weight, self._bias, "mul")
        return y


class PackedGatedMLP:
    """Two products with the activation and the multiplication fused in: no pass over memory of their own."""

    def __init__(
        self, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> None:
        self._gate, self._up = PackedLinear(gate, gate_bias), PackedLinear(up, up_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.times(x, self._gate.silu(x))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """`weight` [outputs, inputs] on the device and in the dtype it is to be used in."""
    return (PackedLinear if can_pack(weight.device, weight.dtype) else PlainLinear)(weight, bias)


def make_gated_mlp(
    gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None = None, up_bias: torch.Tensor | None = None
) -> GatedMLP:
    packed = can_pack(gate.device, gate.dtype)
    return (PackedGatedMLP if packed else PlainGatedMLP)(gate, up, gate_bias, up_bias)


def min_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows below which padding with more rows is free or faster."""
    return PACKED_MIN_ROWS if can_pack(device, dtype) else 1
