"""Each rule that spans fields, refused twice: by the CRD's CEL and by the models, both with a message and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api.crd import custom_resource_definition
from forebay_operator.api.load import SpecError, from_server, load_manifest
from forebay_operator.api.ratio import Ratio
from forebay_operator.api.scaling import RatioBounds
from support.admission import admit, evaluate
from support.manifests import changed
from support.specs import ADMITTED, REFUSED

CRD = custom_resource_definition()
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def load(manifest: dict[str, Any]) -> None:
    load_manifest(yaml.safe_dump(manifest), "m.yaml")


@pytest.mark.parametrize(("changes", "cel", "model"), REFUSED)
def test_refused_by_the_api_server_and_by_the_models(changes: dict[str, Any], cel: str, model: str) -> None:
    _, faults = admit(changed(changes), CRD)
    assert len(faults) == 1, faults
    assert cel in faults[0]
    with pytest.raises(SpecError) as caught:
        load(changed(changes))
    assert model in str(caught.value)


@pytest.mark.parametrize("changes", ADMITTED)
def test_admitted_by_both(changes: dict[str, Any]) -> None:
    assert admit(changed(changes), CRD)[1] == []
    load(changed(changes))


def _messages(node: dict[str, Any]) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for child in (*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")):
        if child:
            yield from _messages(child)


def test_an_object_of_the_api_server_is_read_whatever_its_metadata_holds() -> None:
    stored, _ = admit(changed({}), CRD)
    stored["metadata"] |= {"namespace": "1a", "uid": "u", "managedFields": [{}], "annotations": {"a": "x" * 100_000}}
    model = from_server(stored)
    assert (model.metadata.namespace, model.metadata.name, model.metadata.annotations) == ("1a", "assistant", {})
    stored["spec"]["engine"]["type"] = "VLLM"
    with pytest.raises(SpecError) as caught:
        from_server(stored)
    assert str(caught.value) == (
        "DisaggregatedModel 1a/assistant: spec.engine.type: VLLM is not supported yet; use Native or Simulated"
    )


def test_a_pod_template_of_a_megabyte_is_refused_in_few_words() -> None:
    """The API server takes it: an open map has no size there. The operator does not build from it."""
    stored, faults = admit(changed({"decode.podTemplate": {"metadata": {"annotations": {"a": "x" * 1_000_000}}}}), CRD)
    assert faults == []
    with pytest.raises(SpecError) as caught:
        from_server(stored)
    assert "spec.decode.podTemplate: is 1000" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_every_rule_has_a_refused_example() -> None:
    """A rule without one might be always true."""
    examples = [cel for _, cel, _ in REFUSED]
    missing = [message for message in set(_messages(SCHEMA)) if not any(text in message for text in examples)]
    assert missing == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model.source": "s3://bucket"}, ".spec.model.source: does not match"),
        ({"model.servedName": ""}, ".spec.model.servedName: length 0"),
        ({"prefill.replicas": 0}, ".spec.prefill.replicas: must be at least 1"),
        ({"transfer.timeoutSeconds": 26}, ".spec.transfer.timeoutSeconds: must be at most 25"),
        ({"scaling.mode": "auto"}, ".spec.scaling.mode: unsupported value"),
        ({"scaling.ratio": {"min": "0:1"}}, ".spec.scaling.ratio.min: does not match"),
        ({"prefill.podTemplate": {"containers": []}}, ".spec.prefill.podTemplate.containers: unknown field"),
        ({"prefill.podTemplate": {"spec": {"containers": [{}]}}}, "containers[0].name: required value"),
        ({"scaling.behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1}]}}}, "periodSeconds: required"),
        ({"scaling.performanceModel": "x" * 4097}, ".spec.scaling.performanceModel: length 4097"),
        ({"engine.threads": 1.5}, ".spec.engine.threads: must be of type integer"),
    ],
)
def test_refused_by_the_schema_alone_and_by_the_models(changes: dict[str, Any], fault: str) -> None:
    _, faults = admit(changed(changes), CRD)
    assert any(fault in line for line in faults), faults
    with pytest.raises(SpecError):
        load(changed(changes))


sides = st.integers(1, 999)


@settings(max_examples=40)
@given(sides, sides, sides, sides)
def test_the_ratio_rule_is_the_same_in_cel(p1: int, d1: int, p2: int, d2: int) -> None:
    low, high = Ratio(p1, d1), Ratio(p2, d2)
    assert evaluate(RatioBounds.rules[0].cel, {"min": str(low), "max": str(high)}) == low.at_most(high)
