"""The transformer in the CPU kernels (kernels/cpu/): the same model as network.py, one call a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from forebay_engine.kernels.compiler import KernelsUnavailable
from forebay_engine.kernels.library import KernelLayer, KernelModel, Kernels, Part
from forebay_engine.model.layer_weights import LayerWeights, Loader, embedding_table
from forebay_engine.model.rope import inverse_frequencies
from forebay_engine.model.spec import ModelSpec
from forebay_engine.model.weights import WeightFiles

_MOST_GROUP = 192
"""Query heads that share a KV head: attention.h's QUERY_ROWS."""


class NativeNetwork:
    """A loaded model. Not thread-safe. A token's numbers depend on its sequence only, not on batch or chunks."""

    def __init__(self, folder: Path, spec: ModelSpec, kernels: Kernels, arena: torch.Tensor, threads: int) -> None:
        """Pack the weights of `folder`.

        Raises ModelError when a tensor is missing or has another shape, KernelsUnavailable when the kernels can't
        compute this model.
        """
        if spec.hidden % 2:
            raise KernelsUnavailable(f"the kernels take bfloat16 in pairs, and hidden_size is {spec.hidden}")
        if spec.heads // spec.kv_heads > _MOST_GROUP:
            raise KernelsUnavailable(
                f"{spec.heads // spec.kv_heads} query heads share a KV head, the kernels take {_MOST_GROUP} at most"
            )
        self.spec = spec
        cpu = torch.device("cpu")
        with WeightFiles(folder) as files, torch.inference_mode():
            loader = Loader(files, spec, kernels.dtype, cpu, folds=True)
            model = KernelModel(
                hidden=spec.hidden,
                heads=spec.heads,
                rms_eps=spec.rms_eps,
                frequencies=inverse_frequencies(spec).contiguous(),
                layers=[_pack(kernels, spec, loader.layer(i)) for i in range(spec.layers)],
                head=kernels.pack(loader.head()),
            )
        with WeightFiles(folder) as files:
            # Mapped anew, so that the pages of all the other weights don't stay with this process.
            self._embedding = embedding_table(files, spec, kernels.dtype, cpu)
        self._dtype = kernels.dtype
        try:
            self._engine = kernels.open(model, arena, threads)
        except MemoryError as error:
            raise KernelsUnavailable(str(error)) from error

    def forward(self, token_ids: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        """Hidden states, float32 [n, hidden], after the last layer, before the final norm.

        `token_ids` int64 [n] are those of `parts`, in order.
        """
        hidden = F.embedding(token_ids, self._embedding).to(self._dtype).float().contiguous()
        self._engine.forward_(hidden, parts)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden] from `forward`."""
        return self._engine.logits(hidden.contiguous())[:, : self.spec.vocab_size]

    def close(self) -> None:
        self._engine.close()


def _pack(kernels: Kernels, spec: ModelSpec, weights: LayerWeights) -> KernelLayer:
    gate, up = weights.gate, weights.up
    bias = None if gate.bias is None or up.bias is None else (gate.bias, up.bias)
    gate_up = kernels.pack_gate_up(gate.weight, up.weight, bias)
    return KernelLayer(
        qkv=kernels.pack(weights.qkv.weight, weights.qkv.bias),
        out=kernels.pack(weights.out.weight, weights.out.bias),
        gate_up=gate_up,
        down=kernels.pack(weights.down.weight, weights.down.bias, inputs=gate_up.blocks * kernels.block // 2),
        q_norm=_head_norm(weights.q_norm, spec),
        k_norm=_head_norm(weights.k_norm, spec),
    )


def _head_norm(weight: torch.Tensor | None, spec: ModelSpec) -> torch.Tensor | None:
    return None if weight is None else weight.float() * spec.head_size**0.5
