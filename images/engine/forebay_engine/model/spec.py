"""What a model folder says about itself: config.json and generation_config.json, read into one frozen ModelSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay_engine.errors import ModelError
from forebay_engine.json_file import read_object

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies ("llama3" in Hugging Face's modeling_rope_utils)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer of the Llama kind: sizes and the switches that differ between families."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_len: int
    """Positions the model was made for."""

    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k before the rotation (Qwen3)."""

    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None


def read_spec(folder: Path) -> ModelSpec:
    """Read a model folder's configuration. Raises ModelError naming the file, the field and what is supported."""
    config_file = folder / "config.json"
    config = _Fields(config_file, read_object(config_file))
    architecture = _architecture(config)
    qwen = architecture != "LlamaForCausalLM"
    _refuse_what_is_not_implemented(config)

    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    hidden = config.count("hidden_size")
    if heads % kv_heads:
        raise ModelError(f"{config_file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{config_file}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_size = config.count("head_dim", hidden // heads)
    if head_size % 2:
        raise ModelError(f"{config_file}: head_dim is {head_size}; rotary embeddings need an even one")
    vocab_size = config.count("vocab_size")
    attention_bias = config.flag("attention_bias")
    theta, scaling = _rope(config)
    return ModelSpec(
        architecture=architecture,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=config.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        max_len=config.count("max_position_embeddings"),
        rms_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=not qwen and config.flag("mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=config.flag("tie_word_embeddings"),
        eos_ids=_eos_ids(folder, config, vocab_size),
        bos_id=config.raw.get("bos_token_id") if isinstance(config.raw.get("bos_token_id"), int) else None,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object and the file it came from, for errors that can be acted on."""

    file: Path
    raw: dict[str, Any]

    def count(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.file}: {name} is {value!r}, expected a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.file}: {name} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.file}: {name} is {value!r}, expected true or false")
        return bool(value)


def _architecture(config: _Fields) -> str:
    names = config.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelError(f"{config.file}: architectures is {names!r}; supported: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_what_is_not_implemented(config: _Fields) -> None:
    raw = config.raw
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{config.file}: hidden_act is {raw['hidden_act']!r}; supported: 'silu'")
    if raw.get("quantization_config"):
        raise ModelError(f"{config.file}: quantization_config is set; use the model's unquantised weights")
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ()):
        raise ModelError(f"{config.file}: sliding-window attention is not supported; every layer must attend to all")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{config.file}: partial_rotary_factor is {raw['partial_rotary_factor']!r}; supported: 1")


def _rope(config: _Fields) -> tuple[float, RopeScaling | None]:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` beside `rope_scaling` (before)."""
    merged: dict[str, Any] = {"rope_theta": config.raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = config.raw.get(name)
        if part is not None and not isinstance(part, dict):
            raise ModelError(f"{config.file}: {name} is {part!r}, expected an object")
        merged.update(part or {})
    fields = _Fields(config.file, merged)
    theta = fields.number("rope_theta", 10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{config.file}: rope type is {kind!r}; supported: 'default', 'llama3'")
    scaling = RopeScaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_len=fields.count("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(
            f"{config.file}: rope low_freq_factor {scaling.low_freq_factor} must be below high_freq_factor "
            f"{scaling.high_freq_factor}"
        )
    return theta, scaling


def _eos_ids(folder: Path, config: _Fields, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides where it names any: chat models end a turn with an id that config.json lacks."""
    generation = folder / "generation_config.json"
    file, value = config.file, config.raw.get("eos_token_id")
    if generation.exists():
        named = read_object(generation).get("eos_token_id")
        if named is not None:
            file, value = generation, named
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < vocab_size:
            raise ModelError(f"{file}: eos_token_id {id_!r} is no id below vocab_size {vocab_size}")
    return tuple(ids)
