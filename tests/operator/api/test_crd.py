"""The CRD: checked in as generated, structural by every rule of the API server, and of one mind with the models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay_operator.api.crd import NAME, custom_resource_definition, render
from forebay_operator.api.load import load_manifest
from forebay_operator.api.status import DisaggregatedModelStatus
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from support.admission import admit, broken_rules
from support.structural import lint

ROOT = Path(__file__).parents[3]
CHECKED_IN = ROOT / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml"
CRD = custom_resource_definition()
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
LAST_APPLIED_LIMIT = 256 * 1024
"""Of all annotations together: client-side `kubectl apply` keeps a copy of the object in one."""


def test_the_checked_in_file_is_the_generated_one() -> None:
    assert CHECKED_IN.read_text() == render(), "run `make generate` and commit the result"


def test_the_file_fits_client_side_apply_and_holds_no_template_syntax() -> None:
    text = CHECKED_IN.read_text()
    assert len(text.encode()) < LAST_APPLIED_LIMIT // 2
    for syntax in ("{{", "}}", "${"):
        assert syntax not in text, "Helm or Flux would substitute it"


def test_the_schema_is_structural_and_bounded() -> None:
    assert list(lint(SCHEMA)) == []


def _objects(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _objects(child, f"{path}.{name}")


def test_defaults_keep_the_rules_as_they_are_written() -> None:
    """The API server refuses the CRD otherwise: it does not fill a default in before it judges it."""
    with_default = [(path, node) for path, node in _objects(SCHEMA) if "default" in node]
    assert len(with_default) > 30
    for path, node in with_default:
        assert list(broken_rules(node["default"], node, path)) == []


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ({"$ref": "#/x"}, "$ref"),
        ({"type": "number", "minimum": 0, "maximum": 1}, "type 'number'"),
        ({"anyOf": [{"type": "string"}]}, "anyOf"),
        ({"type": "string"}, "without maxLength"),
        ({"type": "string", "maxLength": 1, "title": "T"}, "title"),
        ({"type": "string", "maxLength": 1, "pattern": "(?=a)"}, "not RE2"),
        ({"type": "string", "maxLength": 1, "default": None}, "default null"),
        ({"type": "string", "maxLength": 1, "default": "ab"}, "default: : length 2"),
        ({"type": "integer", "minimum": 0, "format": "int32"}, "without maximum"),
        ({"type": "integer", "exclusiveMinimum": 0, "minimum": 0, "maximum": 1, "format": "int32"}, "exclusiveMin"),
        ({"type": "object", "properties": {}, "additionalProperties": False}, "beside properties"),
        ({"type": "object", "additionalProperties": {"type": "boolean"}}, "without maxProperties"),
        ({"type": "object"}, "keeps nothing"),
        ({"type": "array", "maxItems": 1, "x-kubernetes-list-type": "atomic"}, "without items"),
        ({"type": "array", "items": {"type": "boolean"}, "x-kubernetes-list-type": "atomic"}, "without maxItems"),
        ({"type": "array", "maxItems": 1, "items": {"type": "boolean"}}, "list type None"),
        (
            {
                "type": "array",
                "maxItems": 1,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 1}}},
            },
            "neither required nor defaulted",
        ),
    ],
)
def test_the_linter_sees_what_the_api_server_would(node: dict[str, Any], fault: str) -> None:
    assert any(fault in line for line in lint(node)), list(lint(node))


def test_names_subresources_and_columns() -> None:
    names, version = CRD["spec"]["names"], CRD["spec"]["versions"][0]
    assert CRD["metadata"]["name"] == NAME == f"{names['plural']}.{CRD['spec']['group']}"
    assert names["shortNames"] == ["dm"]
    assert names["categories"] == ["forebay"]
    assert set(version["subresources"]) == {"status", "scale"}
    columns = [column["name"] for column in version["additionalPrinterColumns"] if column["priority"] == 0]
    assert columns == [
        "Model", "Ready", "Reason", "Prefill", "Decode", "Ratio", "TTFT-P95", "TPOT-P95", "Age",
    ]  # fmt: skip


def test_every_path_in_columns_and_scale_leads_to_a_field() -> None:
    version = CRD["spec"]["versions"][0]
    scale = version["subresources"]["scale"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]] + list(scale.values())
    for path in paths:
        node = SCHEMA
        for step in path.split("[")[0].strip(".").split("."):
            if step == "metadata":
                break
            assert step in node["properties"], path
            node = node["properties"][step]


def test_a_fresh_object_is_in_progress_for_kstatus() -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    stored, faults = admit(manifest, CRD)
    assert faults == []
    assert stored["status"]["observedGeneration"] == -1


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_admitted_and_read_back_the_same(path: Path) -> None:
    """Defaults are the same on both sides: what the API server stores means what the file means."""
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest.get("kind") != "DisaggregatedModel":
            continue
        stored, faults = admit(manifest, CRD)
        assert faults == []
        stored.pop("status")
        as_stored = load_manifest(yaml.safe_dump(stored), "stored").model.spec
        assert as_stored == load_manifest(yaml.safe_dump(manifest), "file").model.spec


def test_no_field_of_the_models_is_lost() -> None:
    def fields(model: Any, path: str = "") -> set[str]:
        found: set[str] = set()
        schema = model.model_json_schema(by_alias=True)

        def walk(node: dict[str, Any], at: str) -> None:
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
            for option in node.get("anyOf", ()):
                walk(option, at)
            for name, child in node.get("properties", {}).items():
                found.add(f"{at}.{name}")
                walk(child, f"{at}.{name}")
            if isinstance(node.get("items"), dict):
                walk(node["items"], at)

        walk(schema, path)
        return found

    def in_crd(node: dict[str, Any], at: str) -> set[str]:
        found = set()
        for name, child in node.get("properties", {}).items():
            found |= {f"{at}.{name}"} | in_crd(child, f"{at}.{name}")
        return found | (in_crd(node["items"], at) if "items" in node else set())

    for name, model in (("spec", DisaggregatedModelSpec), ("status", DisaggregatedModelStatus)):
        assert in_crd(SCHEMA["properties"][name], "") == fields(model)


def test_a_status_of_ours_is_admitted() -> None:
    manifest = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    status = {
        "observedGeneration": 7,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "observedGeneration": 7,
            }
        ],
        "prefill": {"replicas": 2, "serving": 3, "target": 3, "onLoan": 0, "summary": "3/3"},
        "ratio": "3:5",
        "latency": {"timeToFirstTokenP95Milliseconds": 640, "attainmentPercent": 99},
        "transport": {"inUse": "RDMA", "measuredGigabytesPerSecond": "43.1"},
        "decision": {"time": "2026-01-01T00:00:00Z", "action": "Hold", "from": "3:5", "to": "3:5", "reason": "Steady"},
        "operation": {"kind": "ScaleIn", "steps": [{"name": "x"}]},
    }
    _, faults = admit({**manifest, "status": status}, CRD)
    assert faults == []
    broken = copy.deepcopy(status)
    broken["conditions"].append(broken["conditions"][0])  # type: ignore[attr-defined]
    _, faults = admit({**manifest, "status": broken}, CRD)
    assert any("duplicate" in fault for fault in faults)
