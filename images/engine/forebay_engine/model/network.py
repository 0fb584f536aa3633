"""The transformer: weights by layer, and one forward pass over a step's tokens. Attention is given by the caller.

Follows LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM of Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from forebay_engine.model.layer_weights import Loader, Matrix, embedding_table
from forebay_engine.model.linear import Linear, make_linear, min_rows
from forebay_engine.model.norm import FoldedRMSNorm, RMSNorm
from forebay_engine.model.rope import Rotation, inverse_frequencies
from forebay_engine.model.spec import ModelSpec
from forebay_engine.model.weights import WeightFiles


class Attention(Protocol):
    """Paged attention of one step."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store the step's K and V, attend, and give [rows, heads * head_size].

        `qkv` is [rows, heads + 2 * kv_heads, head_size], contiguous, q and k rotated, q scaled by
        head_size^-0.5; rows after the step's tokens are padding.
        """


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Norm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Network:
    """A loaded model. Not thread-safe; deterministic."""

    def __init__(self, folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Load the weights of `folder`. Raises ModelError when a tensor is missing or has another shape."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.min_rows = min_rows(device, dtype)
        self._inverse = inverse_frequencies(spec).to(device)
        with WeightFiles(folder) as files, torch.inference_mode():
            loader = Loader(files, spec, dtype, device, folds=device.type == "cpu")
            self._layers = [_layer(loader, i) for i in range(spec.layers)]
            self._norm = _norm(spec, None if loader.folds else loader.final_norm())
            self._head = make_linear(loader.head())
        with WeightFiles(folder) as files:
            # Mapped anew, so that the pages of all the other weights don't stay with this process.
            self._embedding = embedding_table(files, spec, dtype, device)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states [n or more, hidden] after the last layer, before the final norm.

        `token_ids` and `positions` are int64 [n]. Rows beyond n are padding.
        """
        spec = self.spec
        missing = self.min_rows - token_ids.shape[0]
        if missing > 0:
            token_ids, positions = F.pad(token_ids, (0, missing)), F.pad(positions, (0, missing))
        rows = token_ids.shape[0]
        rotation = Rotation(self._inverse, positions, self.dtype)
        rotated = spec.heads + spec.kv_heads
        x = F.embedding(token_ids, self._embedding).to(self.dtype)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(x)).view(rows, -1, spec.head_size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qkv[:, : spec.heads], qkv[:, spec.heads : rotated]
                q.copy_(layer.q_norm(q))
                k.copy_(layer.k_norm(k))
            rotation.apply_(qkv[:, :rotated])
            x.add_(layer.out(attention(index, qkv)))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x.add_(layer.down(F.silu(gate).mul_(up)))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden] from `forward`."""
        rows = hidden.shape[0]
        if rows < self.min_rows:
            hidden = F.pad(hidden, (0, 0, 0, self.min_rows - rows))
        return self._head(self._norm(hidden))[:rows].float()


def _norm(spec: ModelSpec, weight: torch.Tensor | None) -> Norm:
    """Without a weight: it is folded into the matrix that follows."""
    return FoldedRMSNorm(spec.hidden, spec.rms_eps) if weight is None else RMSNorm(weight, spec.rms_eps)


def _layer(loader: Loader, index: int) -> _Layer:
    spec, weights = loader.spec, loader.layer(index)
    input_norm, mlp_norm = (None, None) if loader.folds else loader.layer_norms(index)
    gate, up = weights.gate, weights.up
    bias = torch.cat([gate.bias, up.bias]) if gate.bias is not None and up.bias is not None else None
    return _Layer(
        input_norm=_norm(spec, input_norm),
        qkv=_linear(weights.qkv),
        q_norm=None if weights.q_norm is None else RMSNorm(weights.q_norm, spec.rms_eps),
        k_norm=None if weights.k_norm is None else RMSNorm(weights.k_norm, spec.rms_eps),
        out=_linear(weights.out),
        mlp_norm=_norm(spec, mlp_norm),
        gate_up=make_linear(torch.cat([gate.weight, up.weight]), bias),
        down=_linear(weights.down),
    )


def _linear(matrix: Matrix) -> Linear:
    return make_linear(matrix.weight, matrix.bias)
