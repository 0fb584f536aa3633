"""What a request leaves open is sampled as the model's makers recommend; what it says wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay_engine.errors import ModelError
from forebay_engine.sampling.defaults import SamplingDefaults, read_defaults
from forebay_engine.server import schema
from forebay_engine.server.plan import ModelLimits, make_plan
from forebay_engine.text.simulated import SimulatedTokenizer
from forebay_engine.types import SamplingParams


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def params(defaults: SamplingDefaults, **fields: Any) -> SamplingParams:
    tokenizer = SimulatedTokenizer()
    tokenizer.sampling_defaults = defaults
    request = schema.parse_completion({"model": "m", "prompt": "hi", **fields})
    limits = ModelLimits("m", 64, tokenizer.vocab_size)
    return make_plan(request, [[104, 105]], ["hi"], tokenizer, limits, default_seed=1).params


def test_a_folder_without_the_file_or_with_nulls_recommends_nothing(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()
    assert read_defaults(write(tmp_path, temperature=None, eos_token_id=2, do_sample=False)) == SamplingDefaults()


def test_recommended_values_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=0, repetition_penalty=1.05)
    assert read_defaults(folder) == SamplingDefaults(0.6, 0.95, 20, 0.0, 1.05)
    assert read_defaults(write(tmp_path, top_k=-1)).top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {name} is "):
        read_defaults(write(tmp_path, **{name: value}))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_defaults(tmp_path)


def test_the_request_wins_over_the_folder_field_by_field() -> None:
    defaults = SamplingDefaults(0.6, 0.95, 20, 0.1, 1.05)
    left_open = params(defaults)
    assert (left_open.temperature, left_open.top_p, left_open.top_k, left_open.min_p) == (0.6, 0.95, 20, 0.1)
    assert left_open.repetition_penalty == 1.05
    said = params(defaults, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    assert (said.temperature, said.top_p, said.top_k, said.min_p, said.repetition_penalty) == (0, 1, 0, 0, 1)
    assert params(defaults, top_k=0).top_k == 0
    assert params(defaults, temperature=1.5).top_p == 0.95
