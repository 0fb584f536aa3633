"""The transformer: weights by layer, and one forward pass over a step's tokens. Attention is given by the caller.

Follows LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM of Hugging Face's transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from forebay_engine.model.linear import Linear, make_linear, min_rows
from forebay_engine.model.norm import FoldedRMSNorm, RMSNorm, fold
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
            loader = _Loader(files, spec, dtype, device)
            self._layers = [loader.layer(i) for i in range(spec.layers)]
            self._norm = loader.norm("model.norm.weight")
            head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
            self._head = make_linear(loader.matrix(head, spec.vocab_size, spec.hidden, after="model.norm.weight"))
        with WeightFiles(folder) as files:
            # On a CPU the table stays the file's mapping in the file's dtype: its pages are shared between workers, and
            # converting the few rows of a step gives the same numbers as converting all of it. The files are mapped
            # anew, so that the pages of all the other weights don't stay with this process.
            table = files.get("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))
            self._embedding = table if device.type == "cpu" else table.to(device, dtype)

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


@dataclass(frozen=True, slots=True)
class _Loader:
    files: WeightFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    def matrix(
        self, name: str, outputs: int, inputs: int, *, after: str | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """`after` names the norm that the matrix follows. What is multiplied in, is so before rounding to the dtype."""
        matrix = self.files.get(name, (outputs, inputs))
        if after is not None and self.folds:
            matrix = fold(self.files.get(after, (inputs,)), matrix)
        if scale != 1.0:
            matrix = matrix.float() * scale
        return matrix.to(self.device, self.dtype)

    def vector(self, name: str, size: int, *, scale: float = 1.0) -> torch.Tensor:
        # A new tensor always, or a float32 vector would keep its whole file mapped.
        return (self.files.get(name, (size,)).float() * scale).to(self.device, self.dtype)

    @property
    def folds(self) -> bool:
        return self.device.type == "cpu"

    def norm(self, name: str) -> Norm:
        if self.folds:
            return FoldedRMSNorm(self.spec.hidden, self.spec.rms_eps)
        return RMSNorm(self.vector(name, self.spec.hidden), self.spec.rms_eps)

    def head_norm(self, name: str, scale: float = 1.0) -> RMSNorm:
        return RMSNorm(self.vector(name, self.spec.head_size, scale=scale), self.spec.rms_eps)

    def layer(self, index: int) -> _Layer:
        spec, at = self.spec, f"model.layers.{index}"
        q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        input_norm, mlp_norm = f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"
        # Attention's scale is multiplied into what q comes from last: the rotation after it keeps it.
        scale = spec.head_size**-0.5
        parts = [
            (f"{at}.self_attn.{name}_proj", rows, 1.0 if name != "q" or spec.qk_norm else scale)
            for name, rows in (("q", q), ("k", kv), ("v", kv))
        ]
        qkv = torch.cat(
            [self.matrix(f"{n}.weight", rows, spec.hidden, after=input_norm, scale=by) for n, rows, by in parts]
        )
        qkv_bias = (
            torch.cat([self.vector(f"{n}.bias", rows, scale=by) for n, rows, by in parts]) if spec.qkv_bias else None
        )
        out, mlp = f"{at}.self_attn.o_proj", f"{at}.mlp"
        halves = [f"{mlp}.{name}_proj" for name in ("gate", "up")]
        gate_up = torch.cat(
            [self.matrix(f"{n}.weight", spec.intermediate, spec.hidden, after=mlp_norm) for n in halves]
        )
        gate_up_bias = (
            torch.cat([self.vector(f"{n}.bias", spec.intermediate) for n in halves]) if spec.mlp_bias else None
        )
        return _Layer(
            input_norm=self.norm(input_norm),
            qkv=make_linear(qkv, qkv_bias),
            q_norm=self.head_norm(f"{at}.self_attn.q_norm.weight", scale) if spec.qk_norm else None,
            k_norm=self.head_norm(f"{at}.self_attn.k_norm.weight") if spec.qk_norm else None,
            out=make_linear(
                self.matrix(f"{out}.weight", spec.hidden, q),
                self.vector(f"{out}.bias", spec.hidden) if spec.o_bias else None,
            ),
            mlp_norm=self.norm(mlp_norm),
            gate_up=make_linear(gate_up, gate_up_bias),
            down=make_linear(
                self.matrix(f"{mlp}.down_proj.weight", spec.hidden, spec.intermediate),
                self.vector(f"{mlp}.down_proj.bias", spec.hidden) if spec.mlp_bias else None,
            ),
        )
