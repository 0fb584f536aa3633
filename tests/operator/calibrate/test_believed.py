"""From the text of a performance model to what the law believes, and texts that are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from forebay_engine.perf import load
from forebay_operator.api.load import load_manifest
from forebay_operator.calibrate.believed import PROMPT_TOKENS, read_speeds
from forebay_operator.decide.estimate import step_seconds
from forebay_operator.local.errors import InputError
from forebay_operator.local.limits import check_supported

EXAMPLE = Path(__file__).parents[3] / "examples" / "simulated-calibrated.yaml"


def written(name: str, **changes: float) -> str:
    return msgspec.json.encode(msgspec.structs.replace(load(name), **changes)).decode()


@pytest.mark.parametrize("name", ["slow", "h100-llama-8b", "a100-llama-70b"])
def test_the_law_believes_what_the_file_says(name: str) -> None:
    model, speeds = load(name), read_speeds(written(name), max_batch=64)
    assert speeds.prefill_velocity == pytest.approx(PROMPT_TOKENS / model.prefill_seconds(PROMPT_TOKENS))
    assert (speeds.kv_tokens, speeds.max_batch) == (model.kv_capacity_tokens, 64)
    for batch in (1, 8, 64):
        assert step_seconds(speeds, batch, 1000 * batch) == pytest.approx(model.decode_seconds(batch, 1000 * batch))


REFUSED = [
    ("h100-llama-8b", "it begins with 'h100-llama-8b'"),
    ("[]", "Expected `object`, got `array`"),
    ("{}", "Object missing required field `name`"),
    (written("slow").replace("16384", '"16384"'), "Expected `int`, got `str` - at `$.kv_capacity_tokens`"),
    (written("slow")[:-1] + ',"speed":1}', "Object contains unknown field `speed`"),
    (written("slow", kv_capacity_tokens=0), "kv_capacity_tokens is 0; must be at least 1"),
    (written("slow", weights_seconds=-1.0), "weights_seconds is -1; must be at least 0"),
    (written("slow", token_seconds=0.0, weights_seconds=0.0), "2048 prompt tokens take 0 s; token_seconds must be"),
    (
        written("slow", weights_seconds=0.0, sequence_seconds=0.0, token_seconds=0.0, prefill_overhead_seconds=1.0),
        "a decode step takes 0 s; weights_seconds must be over 0",
    ),
]


@pytest.mark.parametrize(("text", "complaint"), REFUSED)
def test_forebay_up_refuses_with_the_field_the_fault_and_the_remedy(text: str, complaint: str) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["scaling"]["performanceModel"] = text
    model = load_manifest(yaml.safe_dump(manifest), "m.yaml").model
    with pytest.raises(InputError) as caught:
        check_supported(model, api_keys_given=False)
    message = str(caught.value)
    assert message.startswith("spec.scaling.performanceModel: ")
    assert complaint in message
    assert message.endswith("give the text of a file that forebay calibrate wrote, as it is")


def test_the_example_is_taken() -> None:
    check_supported(load_manifest(EXAMPLE.read_text(), "m.yaml").model, api_keys_given=False)
