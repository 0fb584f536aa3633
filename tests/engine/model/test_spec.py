"""config.json and generation_config.json: what is read, what is refused and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay_engine.errors import ModelError
from forebay_engine.model.spec import RopeScaling, read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def folder(tmp_path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {name: value for name, value in {**LLAMA, **changes}.items() if value != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_a_llama(tmp_path: Path) -> None:
    spec = read_spec(folder(tmp_path))
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_size) == (2, 4, 2, 16)
    assert (spec.vocab_size, spec.max_len, spec.rope_theta, spec.eos_ids) == (100, 256, 500000.0, (2,))
    switches = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied_embeddings")
    assert [name for name in switches if getattr(spec, name)] == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_key_value_heads": "absent"}, {"kv_heads": 4}),
        ({"head_dim": 32}, {"head_size": 32}),
        ({"head_dim": None}, {"head_size": 16}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"qkv_bias": True, "o_bias": False, "qk_norm": False}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"qkv_bias": False, "qk_norm": True}),
        ({"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"rope_theta": 5.0}),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
            {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192), "rope_theta": 500000.0},
        ),
        ({"rope_scaling": {"type": "default"}}, {"rope_scaling": None}),
        ({"use_sliding_window": False, "sliding_window": 4096}, {"layers": 2}),
        ({"eos_token_id": None}, {"eos_ids": ()}),
        ({"eos_token_id": [1, 2]}, {"eos_ids": (1, 2)}),
    ],
)
def test_variants(tmp_path: Path, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    spec = read_spec(folder(tmp_path, **changes))
    assert {name: getattr(spec, name) for name in wanted} == wanted


def test_generation_config_decides_the_eos_ids(tmp_path: Path) -> None:
    assert read_spec(folder(tmp_path, {"eos_token_id": [7, 2]})).eos_ids == (7, 2)
    assert read_spec(folder(tmp_path, {"temperature": 0.6})).eos_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": "absent"}, ["architectures is None"]),
        ({"hidden_size": 66}, ["hidden_size 66", "num_attention_heads 4"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"vocab_size": True}, ["vocab_size is True"]),
        ({"vocab_size": "absent"}, ["vocab_size is None"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps is -1"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "unquantised"]),
        ({"use_sliding_window": True}, ["sliding-window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding-window"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is None"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE, "low_freq_factor": 9}}, ["low_freq_factor 9.0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
        ({"eos_token_id": 100}, ["eos_token_id 100", "vocab_size 100"]),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        read_spec(folder(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is missing"):
        read_spec(tmp_path / "nowhere")
