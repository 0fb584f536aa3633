"""What every Triton kernel here shares: the decorator, the sizes of tiles, and whether kernels are interpreted.

With TRITON_INTERPRET=1 set before Triton is imported, kernels run on CPU tensors, in numpy: so tests prove them without
a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter multiplies bfloat16 wrongly and in silence: there products are float32 (PRODUCTS_FLOAT32)."""

MIN_PRODUCT = 16
"""The least of each side of a tl.dot."""


def kernel(function: Callable[..., None]) -> Any:
    """triton.jit, with a type. `layer` takes many values: a kernel specialised on it would be compiled thrice."""
    return triton.jit(function, do_not_specialize=["layer"])


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`: Triton's tensors have no other sizes."""
    return max(least, 1 << (size - 1).bit_length())


def warps_for(elements: int) -> int:
    """Of a program that goes over `elements` once: 8 or more for each thread, as 16-byte accesses want."""
    return min(16, max(1, padded(elements) // 256))


def products_float32(dtype: torch.dtype) -> bool:
    return INTERPRETED and dtype != torch.float32
