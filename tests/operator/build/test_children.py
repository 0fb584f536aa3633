"""The set of children of a model: which there are, that Kubernetes would take them, and whose they are."""

from __future__ import annotations

from typing import Any

import kubernetes.client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api import labels
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.children import OPTIONAL_KINDS, children
from forebay_operator.build.names import MAX_NAME, token_secret_name
from forebay_operator.build.secret import token_secret
from forebay_operator.build.surroundings import Surroundings
from support.manifests import make_model

FULL = Surroundings("forebay-system", {"app": "forebay"}, "monitoring", pod_monitors=True)
ALWAYS = {
    ("ServiceAccount", "assistant-router"),
    ("Role", "assistant-router"),
    ("RoleBinding", "assistant-router"),
    ("NetworkPolicy", "assistant-workers"),
    ("NetworkPolicy", "assistant-router"),
    ("PodDisruptionBudget", "assistant-prefill"),
    ("PodDisruptionBudget", "assistant-decode"),
    ("PodDisruptionBudget", "assistant-router"),
    ("Deployment", "assistant-router"),
    ("Service", "assistant-router"),
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"engine.type": "Simulated", "model.source": ...},
    {"model.source": "image://a/b:1", "router.apiKeysSecretRef": {"name": "keys"}, "router.replicas": 1},
    {"model.source": "hostpath:///srv/m", "prefill.gpus": {"count": 0}, "decode.gpus": {"count": 0}},
    {"model.source": "cache://smollm2-135m", "transfer": {"transport": "RDMA", "rdma": {"networks": ["a", "b/c"]}}},
    {
        "prefill.nodeSelector": {"gpu": "h100"},
        "prefill.tolerations": [{"operator": "Exists"}],
        "prefill.affinity": {"podAntiAffinity": {}},
        "prefill.topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "prefill.priorityClassName": "high",
        "prefill.runtimeClassName": "nvidia",
        "prefill.podTemplate": {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}},
        "engine.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
    },
]


def build(model: DisaggregatedModel, surroundings: Surroundings = FULL) -> tuple[dict[str, Any], ...]:
    return children(model, uid="u-1", replicas={"prefill": 1, "decode": None}, surroundings=surroundings)


def names(objects: tuple[dict[str, Any], ...]) -> set[tuple[str, str]]:
    """Worker Deployments without their revision."""
    found = set()
    for child in objects:
        revision = child["metadata"]["labels"].get(labels.REVISION, "")
        found.add((child["kind"], child["metadata"]["name"].removesuffix(f"-{revision}")))
    return found


@pytest.mark.parametrize("changes", VARIANTS)
def test_kubernetes_knows_every_field(changes: dict[str, Any]) -> None:
    """The official client's models refuse unknown fields, wrong types and missing ones."""
    model = make_model(changes)
    for child in (*build(model), token_secret(model, b"t" * 32)):
        if child["kind"] != "PodMonitor":
            getattr(kubernetes.client, f"V1{child['kind']}").model_validate(child)


@pytest.mark.parametrize(
    ("changes", "surroundings", "more", "fewer"),
    [
        ({}, Surroundings(), set(), set()),
        ({}, FULL, {("PodMonitor", "assistant")}, set()),
        ({"router.replicas": 1}, Surroundings(), set(), {("PodDisruptionBudget", "assistant-router")}),
        (
            {"networkPolicy": "Disabled"},
            Surroundings(),
            set(),
            {("NetworkPolicy", "assistant-workers"), ("NetworkPolicy", "assistant-router")},
        ),
    ],
)
def test_which_children_there_are(
    changes: dict[str, Any],
    surroundings: Surroundings,
    more: set[tuple[str, str]],
    fewer: set[tuple[str, str]],
) -> None:
    deployments = {("Deployment", "assistant-prefill"), ("Deployment", "assistant-decode")}
    assert names(build(make_model(changes), surroundings)) == (ALWAYS | deployments | more) - fewer
    assert {kind for kind, _ in fewer | more} <= set(OPTIONAL_KINDS)


def test_identities_and_policies_come_before_the_pods() -> None:
    kinds = [child["kind"] for child in build(make_model())]
    first_pod = kinds.index("Deployment")
    assert all(kinds.index(kind) < first_pod for kind in ("ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"))


def test_every_child_is_owned_and_labelled_and_carries_nothing_of_a_gitops_tool() -> None:
    tracked = make_model(
        {
            "metadata.labels": {"argocd.argoproj.io/instance": "app", "app.kubernetes.io/instance": "release"},
            "metadata.annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}"},
        }
    )
    for child in build(tracked):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["name"], owner["controller"]) == ("u-1", "assistant", True)
        assert child["metadata"]["namespace"] == "llm"
        assert child["metadata"]["labels"][labels.MODEL] == "assistant"
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "assistant"
        assert "annotations" not in child["metadata"]


def test_a_count_left_out_is_left_out() -> None:
    counts = {
        child["metadata"]["labels"].get(labels.POOL): child["spec"].get("replicas", "left out")
        for child in build(make_model())
        if child["kind"] == "Deployment"
    }
    assert counts == {"prefill": 1, "decode": "left out", None: 2}


@settings(max_examples=30)
@given(st.from_regex(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True))
def test_names_fit_whatever_the_model_is_called(name: str) -> None:
    model = make_model({"metadata.name": name})
    objects = (*build(model), token_secret(model, b"t" * 32))
    assert all(len(child["metadata"]["name"]) <= MAX_NAME for child in objects)
    keys = [(child["kind"], child["metadata"]["name"]) for child in objects]
    assert len(keys) == len(set(keys))
    for child in objects:
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())


@pytest.mark.parametrize("token", [b"", b"short", b"a b" * 20, "é".encode() * 20, b"t" * 40 + b"\nx"])
def test_a_token_that_is_none_is_refused(token: bytes) -> None:
    with pytest.raises(ValueError, match="at least 32 ASCII characters"):
        token_secret(make_model(), token)


def test_pods_mount_the_secret_that_is_made() -> None:
    model = make_model()
    secret = token_secret(model, b"t" * 32)
    assert secret["metadata"]["name"] == token_secret_name("assistant")
    assert secret["immutable"] is True
    for child in build(model):
        if child["kind"] == "Deployment":
            volumes = {volume["name"]: volume for volume in child["spec"]["template"]["spec"]["volumes"]}
            assert volumes["token"]["secret"]["secretName"] == secret["metadata"]["name"]
