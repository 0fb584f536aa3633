"""The transformer in Triton kernels (kernels/gpu/) and cuBLAS: the same model as network.py, for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from forebay_engine.kernels.gpu.activation import silu_mul
from forebay_engine.kernels.gpu.norm import add_rms_norm
from forebay_engine.kernels.gpu.rotary import rotate_and_store
from forebay_engine.model.layer_weights import Loader, Matrix, embedding_table
from forebay_engine.model.rope import inverse_frequencies
from forebay_engine.model.spec import ModelSpec
from forebay_engine.model.weights import WeightFiles


class Attention(Protocol):
    """Of one step, over what is in the arena."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[n, heads * head_size]. `qkv` [n, heads + 2 * kv_heads, head_size]: q is rotated, K and V are stored."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Matrix
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


class GpuNetwork:
    """A loaded model. Not thread-safe."""

    def __init__(self, folder: Path, spec: ModelSpec, arena: torch.Tensor) -> None:
        """Load the weights of `folder` to the arena's device, in its dtype.

        Raises ModelError when a tensor is missing or has another shape.
        """
        self.spec = spec
        self._arena = arena
        device, dtype = arena.device, arena.dtype
        self._inverse = inverse_frequencies(spec).to(device)
        with WeightFiles(folder) as files, torch.inference_mode():
            loader = Loader(files, spec, dtype, device, folds=False)
            self._layers = [_layer(loader, i) for i in range(spec.layers)]
            self._norm = loader.final_norm()
            self._embedding = embedding_table(files, spec, dtype, device).to(dtype)
            self._head = self._embedding if spec.tied_embeddings else loader.head()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Hidden states [n, hidden] after the last layer, before the final norm. K and V go to the arena's `slots`.

        `token_ids`, `positions` and `slots` are int32 [n], on the arena's device.
        """
        spec = self.spec
        angles = positions.to(torch.float32)[:, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(token_ids, self._embedding)
        delta = None
        for index, layer in enumerate(self._layers):
            normed = add_rms_norm(x, delta, layer.input_norm, spec.rms_eps)
            qkv = _product(normed, layer.qkv).view(x.shape[0], -1, spec.head_size)
            rotate_and_store(qkv, cos, sin, slots, self._arena, index, spec.heads, layer.head_norms, spec.rms_eps)
            normed = add_rms_norm(x, _product(attention(index, qkv), layer.out), layer.mlp_norm, spec.rms_eps)
            delta = _product(silu_mul(_product(normed, layer.gate_up)), layer.down)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden] from `forward`."""
        normed = add_rms_norm(hidden.contiguous(), None, self._norm, self.spec.rms_eps)
        return F.linear(normed, self._head).float()


def _layer(loader: Loader, index: int) -> _Layer:
    weights = loader.layer(index)
    input_norm, mlp_norm = loader.layer_norms(index)
    gate, up = weights.gate, weights.up
    bias = torch.cat([gate.bias, up.bias]) if gate.bias is not None and up.bias is not None else None
    norms = None
    if weights.q_norm is not None and weights.k_norm is not None:
        norms = (weights.q_norm, weights.k_norm)
    return _Layer(
        input_norm=input_norm,
        qkv=weights.qkv,
        head_norms=norms,
        out=weights.out,
        mlp_norm=mlp_norm,
        gate_up=Matrix(torch.cat([gate.weight, up.weight]), bias),
        down=weights.down,
    )


def _product(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return F.linear(x, matrix.weight, matrix.bias)
