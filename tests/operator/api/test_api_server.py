"""The CRD, the children and the chart before a real API server: it has the last word on all of them.

Needs etcd and kube-apiserver in the cache folder; the skip says how to build them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forebay_operator.api.crd import NAME, custom_resource_definition
from forebay_operator.api.load import from_server
from forebay_operator.build.children import children
from forebay_operator.build.secret import token_secret
from forebay_operator.build.surroundings import Surroundings
from support.admission import admit
from support.api_server import CRDS, MODELS, Object, Server, api_server
from support.manifests import changed, make_model
from support.specs import ADMITTED, REFUSED

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with api_server() as made:
        yield made


def test_the_crd_is_accepted_as_structural(server: Server) -> None:
    _, crd = server.request("GET", f"{CRDS}/{NAME}")
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize(("changes", "cel", "model"), REFUSED)
def test_it_refuses_what_the_emulation_refuses(server: Server, changes: Object, cel: str, model: str) -> None:
    status, answer = server.create(MODELS, changed(changes))
    assert status == 422, answer
    text = answer["message"]
    assert cel.lower() in text.lower() or (text.startswith("DisaggregatedModel") and cel in text)


@pytest.mark.parametrize("changes", ADMITTED)
def test_it_stores_what_the_emulation_stores(server: Server, changes: Object) -> None:
    """Defaults too: what is stored reads back as the same model."""
    manifest = changed(changes)
    status, stored = server.create(MODELS, manifest)
    assert status == 201, stored
    expected, _ = admit(manifest, custom_resource_definition())
    assert stored["spec"] == expected["spec"]
    assert stored["status"] == {"observedGeneration": -1}
    assert from_server(stored).spec == from_server(manifest).spec


def test_scale_sets_the_sum_of_workers_and_status_is_apart(server: Server) -> None:
    bounds = {"minReplicas": 1, "maxReplicas": 4}
    manifest = changed({"prefill": {}, "decode": {}, "scaling": {"prefill": bounds, "decode": bounds}})
    status, made = server.create(MODELS, manifest, dry=False)
    assert status == 201, made
    path = f"{MODELS}/assistant"
    status, answer = server.request("GET", f"{path}/scale")
    assert status == 500, "an HPA can't begin before somebody has set it once (docs/api.md)"
    assert "the spec replicas field" in answer["message"]
    status, _ = server.request(
        "PATCH", f"{path}/scale", {"spec": {"replicas": 5}}, content_type="application/merge-patch+json"
    )
    assert status == 200
    said = {"observedGeneration": 1, "replicas": 5, "selector": "a=b", "summary": "s"}
    status, _ = server.apply(
        f"{path}/status", {"apiVersion": made["apiVersion"], "kind": made["kind"], "status": said}, dry=False
    )
    assert status == 200
    _, scale = server.request("GET", f"{path}/scale")
    assert (scale["spec"], scale["status"]) == ({"replicas": 5}, {"replicas": 5, "selector": "a=b"})
    status, answer = server.request(
        "PATCH", f"{path}/scale", {"spec": {"replicas": 9}}, content_type="application/merge-patch+json"
    )
    assert status == 422
    assert "replicas is outside what the pools allow together" in answer["message"]


def test_the_table_of_kubectl_get(server: Server) -> None:
    table = "application/json;as=Table;v=v1;g=meta.k8s.io"
    _, answer = server.request("GET", MODELS, accept=table)
    columns = [column["name"] for column in answer["columnDefinitions"] if column["priority"] == 0]
    assert columns == [
        "Name", "Model", "Ready", "Reason", "Prefill", "Decode", "Ratio", "TTFT-P95", "TPOT-P95", "Age",
    ]  # fmt: skip


@pytest.mark.parametrize("removal", [None, {"$patch": "delete"}])
def test_what_removes_in_a_pod_template_survives(server: Server, removal: Object | None) -> None:
    """(A null does not survive client-side `kubectl apply`, which keeps it for itself.)"""
    limits = {"limits": {"nvidia.com/gpu": removal}}
    template = {"spec": {"containers": [{"name": "engine", "resources": limits}]}}
    manifest = changed({"decode.podTemplate": template, "metadata.name": "nulls"})
    for stored in (server.create(MODELS, manifest)[1], server.apply(f"{MODELS}/nulls", manifest)[1]):
        (container,) = stored["spec"]["decode"]["podTemplate"]["spec"]["containers"]
        assert container["resources"] == limits


PATHS = {
    "Deployment": "apis/apps/v1",
    "NetworkPolicy": "apis/networking.k8s.io/v1",
    "PodDisruptionBudget": "apis/policy/v1",
    "Role": "apis/rbac.authorization.k8s.io/v1",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1",
    "ClusterRole": "apis/rbac.authorization.k8s.io/v1",
    "ClusterRoleBinding": "apis/rbac.authorization.k8s.io/v1",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1",
    "Secret": "api/v1",
    "Service": "api/v1",
    "ServiceAccount": "api/v1",
    "Namespace": "api/v1",
}
PLURALS = {"NetworkPolicy": "networkpolicies"}


def path_of(obj: Object) -> str:
    plural = PLURALS.get(obj["kind"], obj["kind"].lower() + "s")
    namespace = obj["metadata"].get("namespace")
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"/{PATHS[obj['kind']]}{scope}/{plural}/{obj['metadata']['name']}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"engine.type": "Simulated", "model.source": ..., "router.replicas": 1},
        {"model.source": "image://a/b:1", "router.apiKeysSecretRef": {"name": "keys"}},
        {"model.source": "cache://smollm2-135m", "transfer": {"transport": "RDMA", "rdma": {"networks": ["a"]}}},
        {
            "decode.nodeSelector": {"gpu": "h100"},
            "decode.tolerations": [{"operator": "Exists"}],
            "decode.topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "decode.runtimeClassName": "nvidia",
            "engine.env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "metadata.name": "a" * 63,
        },
    ],
)
def test_children_are_applied_without_a_word(server: Server, changes: Object) -> None:
    model = make_model(changes)
    surroundings = Surroundings("forebay-system", monitoring_namespace="monitoring")
    built = children(model, uid="u", replicas={"prefill": 1, "decode": None}, surroundings=surroundings)
    for child in (*built, token_secret(model, b"t" * 32)):
        status, answer = server.apply(path_of(child), child)
        assert status in (200, 201), (child["kind"], answer.get("message"))


def test_the_plain_install_is_applied_without_a_word(server: Server) -> None:
    for made in yaml.safe_load_all((ROOT / "charts" / "install.yaml").read_text()):
        status, answer = server.apply(path_of(made), made)
        assert status in (200, 201), (made["kind"], answer.get("message"))
