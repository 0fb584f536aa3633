"""A layer's matrices as they are multiplied: parts that share an input joined, norms and scales multiplied in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay_engine.model.norm import fold
from forebay_engine.model.spec import ModelSpec
from forebay_engine.model.weights import WeightFiles


@dataclass(frozen=True, slots=True)
class Matrix:
    """`weight` [outputs, inputs] and `bias` [outputs], in the dtype and on the device they are used in."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    qkv: Matrix
    """q, k and v. Attention's scale, head_size^-0.5, is in q's rows (or in q_norm, where there is one)."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Loader:
    """Reads matrices. With `folds` those that follow a norm hold its weight (`fold`)."""

    files: WeightFiles
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    folds: bool

    def layer(self, index: int) -> LayerWeights:
        spec, at = self.spec, f"model.layers.{index}"
        q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        input_norm, mlp_norm = f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"
        # Attention's scale is multiplied into what q comes from last: the rotation after it keeps it.
        scale = spec.head_size**-0.5
        parts = [
            self._joined(
                f"{at}.self_attn.{name}_proj",
                (rows, spec.hidden),
                spec.qkv_bias,
                after=input_norm,
                scale=scale if name == "q" and not spec.qk_norm else 1.0,
            )
            for name, rows in (("q", q), ("k", kv), ("v", kv))
        ]
        biases = [part.bias for part in parts if part.bias is not None]
        mlp = (spec.intermediate, spec.hidden)
        return LayerWeights(
            qkv=Matrix(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None),
            q_norm=self._vector(f"{at}.self_attn.q_norm.weight", spec.head_size, scale=scale) if spec.qk_norm else None,
            k_norm=self._vector(f"{at}.self_attn.k_norm.weight", spec.head_size) if spec.qk_norm else None,
            out=self._joined(f"{at}.self_attn.o_proj", (spec.hidden, q), spec.o_bias),
            gate=self._joined(f"{at}.mlp.gate_proj", mlp, spec.mlp_bias, after=mlp_norm),
            up=self._joined(f"{at}.mlp.up_proj", mlp, spec.mlp_bias, after=mlp_norm),
            down=self._joined(f"{at}.mlp.down_proj", (spec.hidden, spec.intermediate), spec.mlp_bias),
        )

    def layer_norms(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [hidden] of the norm before attention and of the one before the MLP, where they are not folded."""
        at, hidden = f"model.layers.{index}", self.spec.hidden
        return (
            self._vector(f"{at}.input_layernorm.weight", hidden),
            self._vector(f"{at}.post_attention_layernorm.weight", hidden),
        )

    def final_norm(self) -> torch.Tensor:
        """Likewise, of the norm before the head."""
        return self._vector("model.norm.weight", self.spec.hidden)

    def head(self) -> torch.Tensor:
        """[vocab_size, hidden]."""
        name = "model.embed_tokens.weight" if self.spec.tied_embeddings else "lm_head.weight"
        return self._matrix(name, (self.spec.vocab_size, self.spec.hidden), "model.norm.weight", 1.0)

    def _joined(
        self, name: str, shape: tuple[int, int], biased: bool, *, after: str | None = None, scale: float = 1.0
    ) -> Matrix:
        bias = self._vector(f"{name}.bias", shape[0], scale=scale) if biased else None
        return Matrix(self._matrix(f"{name}.weight", shape, after, scale), bias)

    def _matrix(self, name: str, shape: tuple[int, int], after: str | None, scale: float) -> torch.Tensor:
        """`after` names the norm that the matrix follows. What is multiplied in, is so before rounding to the dtype."""
        matrix = self.files.get(name, shape)
        if after is not None and self.folds:
            matrix = fold(self.files.get(after, (shape[1],)), matrix)
        if scale != 1.0:
            matrix = matrix.float() * scale
        return matrix.to(self.device, self.dtype)

    def _vector(self, name: str, size: int, *, scale: float = 1.0) -> torch.Tensor:
        # A new tensor always, or a float32 vector would keep its whole file mapped.
        return (self.files.get(name, (size,)).float() * scale).to(self.device, self.dtype)


def embedding_table(files: WeightFiles, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[vocab_size, hidden]. On a CPU it stays the file's mapping in the file's dtype: its pages are shared between
    workers, and converting the few rows of a step gives the same numbers as converting all of it."""
    table = files.get("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))
    return table if device.type == "cpu" else table.to(device, dtype)
