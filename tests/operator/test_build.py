"""The builders: whole objects against snapshots (`UPDATE_SNAPSHOTS=1 pytest` rewrites them), rules by table."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.api import labels
from forebay_operator.api.load import load_manifest
from forebay_operator.api.v1alpha1 import RESERVED_ENV, DisaggregatedModel
from forebay_operator.build.expand import expand
from forebay_operator.build.merge import merge
from forebay_operator.build.names import MAX_NAME, child_name
from forebay_operator.build.router import router_deployment
from forebay_operator.build.service import router_service
from forebay_operator.build.worker import worker_deployment, worker_revision

SNAPSHOTS = Path(__file__).parent / "snapshots"
EXAMPLES = Path(__file__).parents[2] / "examples"

GPU = """
apiVersion: serving.forebay.dev/v1alpha1
kind: DisaggregatedModel
metadata: {name: assistant, namespace: llm}
spec:
  model: {source: "pvc://models/llama-3.1-8b", servedName: llama-3.1-8b, maxModelLen: 32768, dtype: BFloat16}
  engine:
    image: engine:test
    kvCache: {memory: 40Gi, blockSize: 32}
    maxRunningRequests: 128
    maxBatchedTokens: 2048
    env: [{name: UCX_NET_DEVICES, value: "mlx5_0:1"}, {name: T, valueFrom: {secretKeyRef: {name: s, key: k}}}]
  objectives: {timeToFirstTokenMilliseconds: 800, timePerOutputTokenMilliseconds: 40}
  prefill:
    replicas: 2
    gpus: {count: 2}
    nodeSelector: {nvidia.com/gpu.product: H100}
    tolerations: [{key: gpu, operator: Exists}]
    podTemplate:
      metadata:
        labels: {team: a, forebay.dev/role: decode, forebay.dev/draining: "true", forebay.dev/pool: decode}
      spec: {containers: [{name: engine, resources: {limits: {memory: 64Gi}}}, {name: sidecar, image: s}]}
  decode: {replicas: 6}
  transfer: {transport: RDMA, required: true, rdma: {count: 2, networks: [rail-0]}, timeoutSeconds: 10}
  router:
    replicas: 3
    image: router:test
    fallback: Refuse
    apiKeysSecretRef: {name: api-keys, key: all}
    serviceType: LoadBalancer
  drain: {timeoutSeconds: 120}
"""


def model(text: str) -> DisaggregatedModel:
    return load_manifest(text, "test").model


def example(name: str) -> DisaggregatedModel:
    return model((EXAMPLES / name).read_text())


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpu", model(GPU)),
        ("smollm2", example("smollm2.yaml")),
        ("simulated", example("simulated-8-workers.yaml")),
    ],
)
def test_built_objects(name: str, source: DisaggregatedModel) -> None:
    objects = [
        worker_deployment(source, "prefill", replicas=2),
        worker_deployment(source, "decode", replicas=6),
        router_deployment(source),
        router_service(source),
    ]
    text = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    snapshot = SNAPSHOTS / f"{name}.yaml"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(text)
    assert text == snapshot.read_text()


def test_labels_select_one_pool_and_revision_and_carry_no_role() -> None:
    deployment = worker_deployment(model(GPU), "prefill", replicas=2)
    on_pods = deployment["spec"]["template"]["metadata"]["labels"]
    selected = deployment["spec"]["selector"]["matchLabels"]
    assert selected.items() <= on_pods.items()
    assert selected[labels.POOL] == "prefill"
    assert deployment["metadata"]["name"].endswith(selected[labels.REVISION])
    assert not {labels.ROLE, labels.DRAINING} & on_pods.keys()
    assert on_pods["team"] == "a"


def test_the_revision_changes_with_the_template_and_with_nothing_else() -> None:
    base = worker_revision(model(GPU), "prefill")
    assert worker_revision(model(GPU), "prefill") == base
    for same in (
        GPU.replace("replicas: 6", "replicas: 7"),
        GPU.replace("timeToFirstTokenMilliseconds: 800", "timeToFirstTokenMilliseconds: 900"),
    ):
        assert worker_revision(model(same), "prefill") == base
    for other in (
        GPU.replace("memory: 40Gi", "memory: 41Gi"),
        GPU.replace("engine:test", "engine:2"),
        GPU.replace("memory: 64Gi", "memory: 65Gi"),
    ):
        assert worker_revision(model(other), "prefill") != base


def test_every_variable_that_a_container_sets_is_reserved() -> None:
    for source in (model(GPU), example("smollm2.yaml")):
        user = {variable.name for variable in source.spec.engine.env}
        for deployment in (
            worker_deployment(source, "decode", replicas=1),
            router_deployment(source),
            router_deployment(source, discovery="File"),
        ):
            container = deployment["spec"]["template"]["spec"]["containers"][0]
            names = [entry["name"] for entry in container["env"]]
            assert len(names) == len(set(names))
            assert set(names) - user <= RESERVED_ENV


@given(st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True))
def test_names_fit_and_differ(name: str) -> None:
    made = child_name(name, "prefill", "0123abcd")
    assert len(made) <= MAX_NAME
    assert made.endswith("-prefill-0123abcd")
    assert "--prefill" not in made or "--" in name or name.endswith("-")
    assert made == child_name(name, "prefill", "0123abcd")
    other = (name[:-1] + ("x" if name[-1] != "x" else "y")) if len(name) > 1 else name + "x"
    assert child_name(other, "prefill", "0123abcd") != made


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A", "$A"),
        ("$", "$"),
        ("$$", "$"),
        ("$(A", "$(A"),
        ("$()", "$()"),
        ("$(A)$", "1$"),
        ("$(D)", "$(A)"),
        ("", ""),
    ],
)
def test_expansion_is_that_of_kubernetes(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1", "B": "2", "D": "$(A)"}) == expanded


@given(st.text(alphabet="$()Ax "))
def test_expansion_without_variables_only_halves_double_dollars(text: str) -> None:
    assert expand(text.replace("$", "$$"), {"A": "1", "": "2"}) == text


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
        (
            {"c": [{"name": "x", "v": 1}, {"name": "y"}]},
            {"c": [{"name": "z"}, {"name": "x", "w": 2}]},
            {"c": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}]},
        ),
        ({"a": {"b": 1}}, {"a": {"$patch": "delete"}}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"$patch": "replace", "d": 3}}, {"a": {"d": 3}}),
        ({"a": {"b": 1}}, {"a": {"b": {"$patch": "delete"}}}, {"a": {}}),
        ({"c": [{"name": "x"}, {"name": "y"}]}, {"c": [{"name": "x", "$patch": "delete"}]}, {"c": [{"name": "y"}]}),
        ({"c": [{"name": "x"}]}, {"c": [{"name": "z", "$patch": "delete"}]}, {"c": [{"name": "x"}]}),
        ({}, {"a": {"$patch": "replace", "b": {"c": None, "d": 1}}}, {"a": {"b": {"d": 1}}}),
        ({"a": {"b": 1}}, {"$patch": "delete"}, {}),
        ({"c": [{"name": "x"}]}, {"c": [{"name": ["x"]}]}, {"c": [{"name": ["x"]}]}),
    ],
)
def test_merge(base: Any, patch: Any, merged: Any) -> None:
    assert merge(base, patch) == merged


json_values = st.recursive(
    st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


@given(st.dictionaries(st.text(max_size=2), json_values), st.dictionaries(st.text(max_size=2), json_values))
def test_merge_is_idempotent_and_leaves_its_arguments_alone(base: Any, patch: Any) -> None:
    before = repr((base, patch))
    once = merge(base, patch)
    assert merge(once, patch) == once
    assert merge(base, {}) == base
    assert repr((base, patch)) == before
