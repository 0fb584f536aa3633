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

    def __init__(self, inverse: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> None:
        """`inverse` [head_size / 2] float32, `positions` [n] integers."""
        angles = positions.to(torch.float32)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        self._half = inverse.shape[0]
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)[:, None, :]
        # rotate_half(x) * sin is x rolled by half a head, times sin with its first half negated.
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)[:, None, :]

    def apply_(self, x: torch.Tensor) -> None:
        """Rotate x [n, heads, head_size] in place."""
        rolled = torch.roll(x, self._half, dims=-1)
        x.mul_(self._cos).addcmul_(rolled, self._sin)
