"""Root-mean-square normalisation (Zhang and Sennrich 2019), over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 and rounded once."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` [size]."""
        size = weight.shape[0]
        self._weight = weight
        self._eps = eps
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size)
        self._eps_root = torch.tensor((size * eps) ** 0.5, device=weight.device)
        self._scaled_weight = weight.float() * size**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like x [..., size]."""
        if x.device.type != "cpu":
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        # F.rms_norm is no fused kernel on a CPU but eight operations, and at one row each costs more to call than to
        # run. Operations that mix dtypes would add hidden copies.
        wide = x.float()
        root = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self._eps_root)
        normed = wide.div(root).mul_(self._scaled_weight)
        return normed.to(x.dtype)
