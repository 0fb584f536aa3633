"""What a manifest may say, and what is said about one that may not."""

from __future__ import annotations

import copy
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.perf import names
from forebay_operator.api.engine import PerformanceModel
from forebay_operator.api.load import MAX_BYTES, SpecError, load_manifest
from forebay_operator.api.quantity import format_bytes, parse_bytes
from forebay_operator.api.ratio import Ratio, parse_ratio
from forebay_operator.api.source import ModelSource, Scheme, parse_source
from forebay_operator.api.v1alpha1 import DisaggregatedModel

EXAMPLES = Path(__file__).parents[2] / "examples"

MINIMAL: dict[str, Any] = {
    "apiVersion": "serving.forebay.dev/v1alpha1",
    "kind": "DisaggregatedModel",
    "metadata": {"name": "m"},
    "spec": {
        "model": {"source": "cache://smollm2-135m", "servedName": "m"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
}

# The whole of the API, as in the design.
FULL = """
apiVersion: serving.forebay.dev/v1alpha1
kind: DisaggregatedModel
metadata: {name: assistant, namespace: llm}
spec:
  model: {source: "pvc://models/llama-3.1-8b", servedName: llama-3.1-8b, maxModelLen: 32768, dtype: Auto}
  engine: {type: Native, image: "engine:1", kvCache: {memory: 40Gi, blockSize: 16}, env: [{name: A, value: b}]}
  objectives: {timeToFirstTokenMilliseconds: 1000, timePerOutputTokenMilliseconds: 40, attainmentPercent: 98}
  prefill:
    gpus: {resource: nvidia.com/gpu, count: 1}
    nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}
    tolerations: [{key: gpu, operator: Exists}]
    podTemplate: {spec: {containers: [{name: engine, env: [{name: X, value: y}]}]}}
  decode: {gpus: {count: 1}, nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}}
  transfer: {transport: RDMA, required: true, rdma: {resource: rdma/hca, count: 1, networks: [a]}, timeoutSeconds: 20}
  scaling:
    mode: Auto
    prefill: {minReplicas: 1, maxReplicas: 7}
    decode: {minReplicas: 1, maxReplicas: 7}
    maxGPUs: 8
    ratio: {min: "1:6", max: "6:1"}
    roleSwitching: Enabled
    behavior: {scaleDown: {stabilizationWindowSeconds: 300}}
    metrics: {source: Prometheus, url: "http://prometheus:9090"}
    pause: None
  router: {replicas: 2, fallback: BothPhases, apiKeysSecretRef: {name: keys}, serviceType: ClusterIP}
  drain: {timeoutSeconds: 600, policy: Finish}
  rollout: {maxUnavailable: 1, maxSurge: 0}
"""

# A map that holds itself.
ENDLESS = yaml.safe_dump(MINIMAL).replace("  prefill:\n", "  prefill:\n    podTemplate: &a {spec: *a}\n")


def with_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """MINIMAL with values set (or, for `...`, removed) by dotted path below spec."""
    manifest = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        node = manifest["spec"]
        *above, last = path.split(".")
        for step in above:
            node = node.setdefault(step, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return manifest


def load(changes: dict[str, Any]) -> DisaggregatedModel:
    return load_manifest(yaml.safe_dump(with_changes(changes)), "m.yaml").model


def test_performance_models_are_those_that_the_engine_knows() -> None:
    assert list(get_args(PerformanceModel)) == names()


def test_the_whole_api_parses_and_keeps_its_values() -> None:
    spec = load_manifest(FULL, "full.yaml").model.spec
    assert spec.scaling.max_gpus == 8
    assert spec.bounds("prefill").max_replicas == 7
    assert spec.objectives.time_per_output_token_milliseconds == 40
    assert spec.scaling.pause == "None"
    dumped = spec.model_dump(by_alias=True, exclude_unset=True)
    assert dumped == yaml.safe_load(FULL)["spec"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_parse(path: Path) -> None:
    load_manifest(path.read_text(), str(path))


def test_there_are_examples() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} >= {"smollm2.yaml", "simulated-8-workers.yaml"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"prefil": {}}, "spec.prefil: is no known field; did you mean prefill?"),
        ({"engine.kvcache": {}}, "spec.engine.kvcache: is no known field; did you mean kvCache?"),
        ({"zzz": 1}, "spec.zzz: is no known field; known here: model, engine, objectives, replicas, "),
        ({"model.servedName": ...}, "spec.model.servedName: is missing; add it"),
        ({"model.servedName": 5}, "spec.model.servedName: is 5; must be a string: put it in quotes"),
        ({"model.servedName": "a b"}, 'spec.model.servedName: is "a b"; must be a model name: letters, digits'),
        ({"model.servedName": "a" * 129}, "129 characters; must have at most 128"),
        ({"model.source": "s3://b"}, "spec.model.source: 's3://b' is not a model source; write pvc://claim/path,"),
        ({"model.source": ...}, "spec: model.source is missing; a Native engine needs one"),
        ({"model.maxModelLen": 0}, "spec.model.maxModelLen: is 0; must be at least 16"),
        ({"model.dtype": "float32"}, "must be 'Auto', 'Float32', 'BFloat16' or 'Float16': did you mean Float32?"),
        ({"engine.type": "VLLM"}, "spec.engine.type: VLLM is not supported yet; use Native or Simulated"),
        ({"engine.type": "TritonServer"}, "TritonServer is not supported yet; use Native or Simulated"),
        (
            {"engine.type": "Simulated", "engine.simulated": {"performanceModel": "h100"}},
            """performanceModel: is "h100"; must be 'a100-llama-70b', 'a100-llama-8b', 'h100-llama-70b', """,
        ),
        ({"engine.simulated": {}}, "spec.engine: simulated needs type: Simulated, not Native"),
        ({"engine.kvCache.memory": "40Q"}, "spec.engine.kvCache.memory: '40Q' is not a quantity of bytes"),
        ({"engine.kvCache.memory": "0"}, "spec.engine.kvCache.memory: '0' is out of range; must be from 1Mi to 16Ti"),
        ({"engine.kvCache.blockSize": 17}, "is 17; must be 16, 32, 64 or 128"),
        (
            {"objectives.timeToFirstTokenMilliseconds": -1},
            "spec.objectives.timeToFirstTokenMilliseconds: is -1; must be at least 0",
        ),
        (
            {"objectives.timePerOutputTokenMilliseconds": -5},
            "spec.objectives.timePerOutputTokenMilliseconds: is -5; must be at least 0",
        ),
        ({"engine.threads": 1.5}, "spec.engine.threads: is 1.5; must be a whole number"),
        ({"engine.threads": "2"}, 'spec.engine.threads: is "2"; must be a whole number, not quoted'),
        ({"engine.threads": True}, "spec.engine.threads: is true; must be a whole number"),
        ({"engine.env": [{"name": "A"}]}, "spec.engine.env[0]: set exactly one of value and valueFrom"),
        ({"engine.env": [{"name": "PORT", "value": "1"}]}, "PORT is set by Forebay itself; choose another name"),
        (
            {"engine.env": [{"name": "A", "value": "1"}] * 2},
            "spec.engine: env names A more than once; keep one of each",
        ),
        ({"engine.env": [{"name": f"A{i}", "value": ""} for i in range(65)]}, "has 65 items; must have at most 64"),
        (
            {"prefill.replicas": ...},
            "spec: prefill has no size; set prefill.replicas (fixed) or scaling.prefill (bounds)",
        ),
        (
            {"scaling.decode": {"maxReplicas": 2}},
            "spec: decode.replicas and scaling.decode are both set; keep one of them",
        ),
        ({"prefill.replicas": 0}, "spec.prefill.replicas: is 0; must be at least 1"),
        ({"prefill.replicas": 513}, "spec.prefill.replicas: is 513; must be at most 512"),
        ({"replicas": 5}, "spec: replicas 5 is outside what the pools allow together, 2 to 2"),
        ({"scaling.maxGPUs": 1}, "spec: scaling.maxGPUs 1 is below the 2 GPUs of the fewest workers"),
        (
            {"scaling.ratio": {"min": "2:1", "max": "1:2"}},
            "min 2:1 has a larger share of prefill than max 1:2; swap them",
        ),
        ({"scaling.ratio.min": "0:1"}, "'0:1' is not a ratio; write prefill:decode, both from 1 to 999, such as 1:2"),
        ({"scaling.mode": "auto"}, "did you mean Auto?"),
        ({"scaling.metrics.source": "Prometheus"}, "url goes with source: Prometheus, and only with it"),
        ({"transfer.timeoutSeconds": 26}, "spec.transfer.timeoutSeconds: is 26; must be at most 25"),
        ({"transfer.required": "yes"}, 'spec.transfer.required: is "yes"; must be true or false, not quoted'),
        ({"transfer.required": True}, "spec.transfer: required: true needs a named transport; set transport to RDMA,"),
        ({"rollout.maxUnavailable": 0}, "spec.rollout: maxUnavailable and maxSurge are both 0"),
        ({"prefill.podTemplate": {"spec": {"x": 1.5}}}, "spec.x is the float 1.5; write it as an integer, or quoted"),
        ({"prefill.podTemplate": {"spec": {1: "x"}}}, "spec has the key 1, which is no string; quote it"),
        ({"prefill.podTemplate": {"spec": {"x": date(2026, 1, 1)}}}, "is a date, which JSON does not have; quote it"),
        ({"prefill.podTemplate": {"spec": "x"}}, "spec.prefill.podTemplate: spec must be a map of fields"),
        ({"prefill.podTemplate": {"metadata": {"labels": ["x"]}}}, "metadata.labels must be a map of strings"),
        ({"prefill.podTemplate": {"metadata": {"annotations": {"a": "x" * 40000}}}}, "bytes as JSON; at most 32768"),
        (
            {"prefill.podTemplate": {"containers": []}},
            "containers is no part of a pod template; write metadata and spec",
        ),
        (
            {"prefill.podTemplate": {"spec": {"volumes": [{"name": "a", "$patch": "remove"}]}}},
            "$patch is 'remove'; must be delete or replace",
        ),
        ({"prefill.podTemplate": {"spec": {"$patch": "delete"}}}, "spec can't be removed or replaced whole"),
        ({"decode.tolerations": "none"}, 'spec.decode.tolerations: is "none"; must be a list'),
        ({"decode": 3}, "spec.decode: is 3; must be a map of fields"),
        (
            {"engine.type": "Simulated", "decode.gpus": {"count": 1}},
            "spec: decode.gpus.count is 1; a Simulated engine uses none: remove gpus",
        ),
    ],
)
def test_errors_name_field_value_limit_and_remedy(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(changes)
    assert error in str(caught.value)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].line


@pytest.mark.parametrize("name", ["A", "1a", "a-", "a" * 64, "", "a.b"])
def test_metadata_name_is_a_dns_label(name: str) -> None:
    manifest = {**MINIMAL, "metadata": {"name": name}}
    with pytest.raises(SpecError, match=r"metadata\.name"):
        load_manifest(yaml.safe_dump(manifest), "m.yaml")


def test_every_problem_is_listed_with_its_line() -> None:
    text = yaml.safe_dump(with_changes({"engine": {"threads": 0, "typo": 1}}), sort_keys=False)
    with pytest.raises(SpecError) as caught:
        load_manifest(text, "m.yaml")
    lines = text.splitlines()
    found = {problem.path: lines[(problem.line or 0) - 1].strip() for problem in caught.value.problems}
    assert found == {"spec.engine.threads": "threads: 0", "spec.engine.typo": "typo: 1"}
    assert str(caught.value).startswith("m.yaml: 2 problems\n  line ")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "it holds nothing"),
        ("kind: ConfigMap", "it holds only ConfigMap"),
        ("a: [", "line 1: is not valid YAML"),
        ("- a\n- b", "it holds only list"),
        ("kind: DisaggregatedModel\nkind: x", "line 2: is not valid YAML: the key 'kind' is there twice; keep one"),
        ("kind: DisaggregatedModel\n---\nkind: DisaggregatedModel", "it holds 2 of them"),
        ("kind: DisaggregatedModel\nmetadata: &a {x: *a}", "apiVersion: is missing"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
        ("a: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        (ENDLESS, "refers to itself through a YAML alias"),
        ("x" * (MAX_BYTES + 1), f"bytes; at most {MAX_BYTES}"),
    ],
)
def test_text_that_is_no_manifest(text: str, error: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_manifest(text, "m.yaml")
    assert error in str(caught.value)


def test_the_value_of_a_variable_is_not_repeated() -> None:
    with pytest.raises(SpecError) as caught:
        load({"engine.env": [{"name": "KEY", "value": 123456}]})
    assert "123456" not in str(caught.value)


def test_what_the_api_server_adds_is_dropped_and_other_documents_are_named() -> None:
    manifest = copy.deepcopy(MINIMAL)
    manifest["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 2, "managedFields": [{}]}
    manifest["status"] = {"observedGeneration": 1}
    loaded = load_manifest(yaml.safe_dump(manifest) + "\n---\nkind: Secret\n---\n", "m.yaml")
    assert loaded.model.metadata.name == "m"
    assert loaded.skipped == ("Secret",)


def test_gpus_default_to_one_and_to_none_when_simulated() -> None:
    assert load({}).spec.gpus_per_worker("prefill").count == 1
    assert load({"engine.type": "Simulated"}).spec.gpus_per_worker("prefill").count == 0


@given(
    whole=st.integers(0, 10**6),
    fraction=st.integers(0, 999),
    unit=st.sampled_from(["", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"]),
)
def test_quantities_are_exact(whole: int, fraction: int, unit: str) -> None:
    factor = {"": 1, "k": 1000, "M": 10**6, "G": 10**9, "T": 10**12}.get(unit) or 1024 ** ("KMGT".index(unit[0]) + 1)
    exact = (whole + Fraction(fraction, 1000)) * factor
    text = f"{whole}.{fraction:03d}{unit}"
    if exact.denominator == 1:
        assert parse_bytes(text) == exact
        assert parse_bytes(format_bytes(int(exact))) == exact
    else:
        with pytest.raises(ValueError, match="not a whole number of bytes"):
            parse_bytes(text)


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1 Gi", "1e3", "1.Gi", "١Gi", "1.2345Gi", "9" * 19])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("pvc://models/llama/8b", ModelSource(Scheme.PVC, "models", "llama/8b")),
        ("pvc://models", ModelSource(Scheme.PVC, "models", "")),
        ("image://host:5000/a/b@sha256:12", ModelSource(Scheme.IMAGE, "host:5000/a/b@sha256:12")),
        ("hostpath:///srv/model/", ModelSource(Scheme.HOSTPATH, "/srv/model")),
        ("cache://smollm2-135m", ModelSource(Scheme.CACHE, "smollm2-135m")),
    ],
)
def test_sources(text: str, source: ModelSource) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "models",
        "pvc://",
        "pvc://a/../b",
        "hostpath://srv",
        "hostpath:///a/../b",
        "cache://",
        "cache://A",
        "cache://a/b",
        "image://",
        "image://a b",
    ],
)
def test_what_is_no_source(text: str) -> None:
    with pytest.raises(ValueError, match=r"://"):
        parse_source(text)


@given(p=st.integers(1, 50), d=st.integers(1, 50), workers=st.integers(1, 200))
def test_a_fitted_ratio_is_the_same_ratio_in_all_workers(p: int, d: int, workers: int) -> None:
    fitted = Ratio(p, d).fit(workers)
    if fitted is None:
        assert workers % (p + d)
    else:
        assert fitted.prefill + fitted.decode == workers
        assert Fraction(fitted.prefill, fitted.decode) == Fraction(p, d)
        assert fitted.at_most(Ratio(p, d))
        assert Ratio(p, d).at_most(fitted)


@given(st.tuples(st.integers(1, 999), st.integers(1, 999)), st.tuples(st.integers(1, 999), st.integers(1, 999)))
def test_ratios_compare_as_fractions(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert Ratio(*a).at_most(Ratio(*b)) == (Fraction(*a) <= Fraction(*b))
    assert parse_ratio(str(Ratio(*a))) == Ratio(*a)
