"""Root-mean-square normalisation (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight, by the last dimension.

At one row each torch operation costs more to call than to run, and F.rms_norm is no fused kernel on a CPU but eight of
them. So there the weight is multiplied into the matrix that follows (`fold`), and three or four operations are left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FEW_ROWS = 16


def fold(weight: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """`into` [outputs, size] times a norm's `weight` [size], in float32: FoldedRMSNorm's part of the product."""
    folded: torch.Tensor = into.float() * (weight.float() * weight.shape[0] ** 0.5)
    return folded


class FoldedRMSNorm:
    """x / |(x, sqrt(size * eps))|: what is left once weight and sqrt(size) are in the next matrix."""

    def __init__(self, size: int, eps: float) -> None:
        self._eps_root = torch.tensor((size * eps) ** 0.5)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like x [..., size]; norm and division are in float32."""
        if x.dtype == torch.float32 or x.shape[0] <= _FEW_ROWS:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            return torch.div(x, torch.hypot(norm, self._eps_root), out=torch.empty_like(x))
        # Division of mixed dtypes is the fewest calls, but it converts each operand apart: slow where there is much.
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(norm, self._eps_root)).to(x.dtype)


class RMSNorm:
    """With its weight [size]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like x [..., size]."""
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
