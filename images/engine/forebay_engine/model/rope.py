"""Rotary position embeddings, computed as Hugging Face's transformers does, in float32."""

from __future__ import annotations

import math

import torch

from forebay_engine.model.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position turns each pair of dimensions: float32 [head_size / 2], scaling applied.

    Kept in float32 throughout: at position 8,000 another rounding here turns the last pairs by 5e-4, which is enough to
    part from the reference's greedy text.
    """
    exponent = torch.arange(0, spec.head_size, 2, dtype=torch.int64).float() / spec.head_size
    base = 1.0 / (spec.rope_theta**exponent)
    return base if spec.rope_scaling is None else _llama3(base, spec.rope_scaling)


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended (modeling_rope_utils)."""
    wavelength = 2 * math.pi / base
    low = scaling.original_max_len / scaling.low_freq_factor
    high = scaling.original_max_len / scaling.high_freq_factor
    kept = torch.where(wavelength > low, base / scaling.factor, base)
    smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * kept / scaling.factor + smooth * kept
    return torch.where((wavelength <= low) & (wavelength >= high), blended, kept)


class Rotation:
    """cos and signed sin of one step's positions, shared by all layers."""

    def __init__(
        self, inverse: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, rotated: int, kept: int
    ) -> None:
        """`inverse` [head_size / 2] float32, `positions` [n] integers; of each row's heads the first `rotated` are
        turned, the `kept` after them are not.

        The kept ones are multiplied by 1 and 0 all the same: over contiguous memory that is cheaper than to leave them
        out.
        """
        n, self._half = positions.shape[0], inverse.shape[0]
        angles = positions.to(torch.float32)[:, None, None, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        still = torch.zeros(n, kept, 2, self._half, device=inverse.device)
        # rotate_half(x) * sin is x with its halves swapped, times sin with its first half negated.
        turned_cos, turned_sin = cos.expand(n, rotated, 2, -1), torch.cat((-sin, sin), 2).expand(n, rotated, 2, -1)
        self._cos = torch.cat((turned_cos, still + 1), 1).to(dtype)
        self._sin = torch.cat((turned_sin, still), 1).to(dtype)

    def apply_(self, x: torch.Tensor) -> None:
        """Rotate x [n, rotated + kept, head_size], contiguous, in place."""
        halves = x.view(self._cos.shape)
        swapped = halves.flip(2)
        halves.mul_(self._cos).addcmul_(swapped, self._sin)
