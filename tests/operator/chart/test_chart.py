"""The Helm chart, rendered: what it installs by its values, what it refuses, and that generated files are current."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import chart_tools
import kubernetes.client
import pytest
import yaml
from chart_tools import CHART, HelmRefused, documented_values, lint, render

from forebay_operator import kube
from forebay_operator.api.reference import render_reference
from forebay_operator.build.ports import HTTP
from forebay_operator.build.rbac import router_role
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.main import parse_args
from forebay_wire import VERSION
from support.manifests import make_model
from support.pod_security import violations

ROOT = Path(__file__).parents[3]
VALUES = {
    "default": {},
    **{path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "ci").glob("*.yaml"))},
}
TYPED = {"ServiceMonitor", "CustomResourceDefinition"}
"""Kinds that the official client has no, or another, model for."""

Object = dict[str, Any]

pytestmark = pytest.mark.skipif(chart_tools.helm_missing() is not None, reason=str(chart_tools.helm_missing()))


@cache
def objects(values: str) -> tuple[Object, ...]:
    return tuple(render(VALUES[values]))


def of_kind(made: tuple[Object, ...] | list[Object], kind: str) -> list[Object]:
    return [each for each in made if each["kind"] == kind]


def only(made: tuple[Object, ...] | list[Object], kind: str) -> Object:
    (found,) = of_kind(made, kind)
    return found


@pytest.mark.parametrize("values", VALUES)
def test_helm_finds_nothing_and_kubernetes_knows_every_field(values: str) -> None:
    assert lint(VALUES[values]) == []
    for made in objects(values):
        if made["kind"] not in TYPED:
            getattr(kubernetes.client, f"V1{made['kind']}").model_validate(made)


@pytest.mark.parametrize("values", VALUES)
def test_the_operators_pod_is_restricted_probed_and_bounded(values: str) -> None:
    deployment = only(objects(values), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert violations(pod) == set()
    (container,) = pod["containers"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["resources"]["limits"]["memory"]
    assert not container["image"].endswith(":latest")
    selected = deployment["spec"]["selector"]["matchLabels"]
    assert selected.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("values", VALUES)
def test_the_operator_understands_its_arguments(values: str) -> None:
    (container,) = only(objects(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    arguments = [argument.replace("$(POD_NAMESPACE)", "ns") for argument in container["args"]]
    settings = parse_args(arguments)
    given = VALUES[values]
    assert settings.namespace == "ns"
    assert settings.namespaces == tuple(given.get("watchNamespaces", ()))
    assert settings.port == container["ports"][0]["containerPort"] == given.get("metrics", {}).get("port", 8080)
    assert settings.surroundings.engine_image == given.get("engineImage")
    assert settings.surroundings.monitoring_namespace == given.get("metrics", {}).get("monitoringNamespace")
    ports = given.get("networkPolicy", {}).get("apiServerPorts", [443, 6443])
    assert list(settings.surroundings.api_server_ports) == ports
    assert settings.log_level == given.get("logLevel", "info")


def test_versions_are_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"crds": {"enabled": False}}, {"CustomResourceDefinition"}),
        ({"serviceAccount": {"create": False, "name": "mine"}}, {"ServiceAccount"}),
        ({"rbac": {"create": False}}, {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}),
        ({"networkPolicy": {"enabled": False}}, {"NetworkPolicy"}),
        ({"podDisruptionBudget": {"enabled": False}}, {"PodDisruptionBudget"}),
        ({"replicas": 1}, {"PodDisruptionBudget"}),
    ],
)
def test_switches_take_away_exactly_their_kinds(values: Object, kinds: set[str]) -> None:
    before, after = {made["kind"] for made in objects("default")}, {made["kind"] for made in render(values)}
    assert before - after == kinds
    assert after <= before


def test_a_service_monitor_comes_by_value_alone() -> None:
    assert of_kind(objects("default"), "ServiceMonitor") == []
    monitor = only(objects("full-values"), "ServiceMonitor")
    service = only(objects("full-values"), "Service")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replica": 1}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"workers": 257}, "workers"),
        ({"metrics": {"serviceMonitor": {"enable": True}}}, "enable"),
        ({"watchNamespaces": ["A"]}, "watchNamespaces"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name is needed"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Object, message: str) -> None:
    with pytest.raises(HelmRefused) as caught:
        render(values)
    assert message in str(caught.value)


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "a" * 64
    made = render({"image": {"repository": "r", "tag": "1", "digest": digest}})
    assert only(made, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"] == f"r@{digest}"


# RBAC


def granted(made: tuple[Object, ...] | list[Object], *, cluster: bool) -> dict[tuple[str, str], set[str]]:
    """(API group, resource) -> verbs that the operator's account gets, for the whole cluster or in some namespace."""
    (account,) = (made_["metadata"]["name"] for made_ in of_kind(made, "ServiceAccount"))
    found: dict[tuple[str, str], set[str]] = {}
    for binding in of_kind(made, "ClusterRoleBinding" if cluster else "RoleBinding"):
        assert [subject["name"] for subject in binding["subjects"]] == [account]
        for role in of_kind(made, binding["roleRef"]["kind"]):
            if role["metadata"]["name"] == binding["roleRef"]["name"]:
                for rule in role["rules"]:
                    for group in rule["apiGroups"]:
                        for resource in rule["resources"]:
                            found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_the_operator_may_do_nothing_by_wildcard_and_read_no_secret_it_cannot_name() -> None:
    for values in VALUES:
        for role in (*of_kind(objects(values), "ClusterRole"), *of_kind(objects(values), "Role")):
            assert "*" not in json.dumps(role["rules"])
    rights = granted(objects("default"), cluster=True)
    assert rights["", "secrets"] == {"get", "create", "patch"}
    assert not any(resource in ("pods/exec", "pods/eviction", "nodes/proxy") for _, resource in rights)


def test_the_kinds_it_may_touch_are_those_its_code_names() -> None:
    used = {kube.MODELS, kube.DEPLOYMENTS, kube.REPLICA_SETS, kube.PODS, kube.NODES, kube.EVENTS, *kube.CHILDREN}
    rights = granted(objects("default"), cluster=True)
    assert {(group, resource) for group, resource in rights if "/" not in resource} == {
        (resource.group, resource.plural) for resource in used
    }
    lease = granted(objects("default"), cluster=False)
    assert lease == {(kube.LEASES.group, kube.LEASES.plural): {"create", "get", "update"}}


def test_it_may_give_the_router_no_more_than_it_has_itself() -> None:
    """The API server refuses a Role with rights that its maker lacks."""
    (rule,) = router_role(make_model({}))["rules"]
    assert set(rule["verbs"]) <= granted(objects("default"), cluster=True)["", "pods"]


def test_in_namespaced_mode_it_has_no_right_on_the_cluster() -> None:
    made = objects("namespaced-values")
    assert granted(made, cluster=True) == {}
    assert {role["metadata"]["namespace"] for role in of_kind(made, "Role")} == {"llm-a", "llm-b", "forebay-system"}
    everywhere = {key: verbs for key, verbs in granted(objects("default"), cluster=True).items() if key[1] != "nodes"}
    assert everywhere.items() <= granted(made, cluster=False).items()


# Network


def test_models_let_in_the_operator_that_the_chart_makes() -> None:
    pod = only(objects("default"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert Surroundings().operator_labels.items() <= pod.items()


def test_the_operator_reaches_models_pods_and_only_prometheus_reaches_it() -> None:
    policy = only(objects("default"), "NetworkPolicy")["spec"]
    assert policy["ingress"] == []
    to_pods = [rule for rule in policy["egress"] if "to" in rule]
    assert [(rule["ports"], rule["to"][0]["podSelector"]) for rule in to_pods] == [
        ([{"protocol": "TCP", "port": HTTP}], {"matchLabels": {"app.kubernetes.io/managed-by": "forebay"}})
    ]
    full = only(objects("full-values"), "NetworkPolicy")["spec"]
    assert full["ingress"][0]["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert {"ports": [{"protocol": "TCP", "port": 9090}]} in full["egress"]
    for egress, own in ((policy["egress"], 6443), (full["egress"], 16443)):
        assert [port["port"] for port in egress[0]["ports"]] == [443, own], "the API server"


# CRD and generated files


def test_the_crd_is_the_generated_one_and_is_kept() -> None:
    definition = only(objects("default"), "CustomResourceDefinition")
    assert definition["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    checked_in = yaml.safe_load((ROOT / "crds" / "serving.forebay.dev_disaggregatedmodels.yaml").read_text())
    assert definition["spec"] == checked_in["spec"]
    assert "annotations" not in only(objects("full-values"), "CustomResourceDefinition")["metadata"]


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (chart_tools.CRD_TEMPLATE, chart_tools.crd_template),
        (chart_tools.README, chart_tools.readme),
        (chart_tools.API_REFERENCE, render_reference),
        (chart_tools.INSTALL, chart_tools.install),
    ],
    ids=["crd", "readme", "api reference", "install"],
)
def test_generated_files_are_current(path: Path, make: Any) -> None:
    assert path.read_text() == make(), "run `make generate` and commit the result"


def test_the_plain_install_is_complete_and_in_order() -> None:
    made = list(yaml.safe_load_all(chart_tools.INSTALL.read_text()))
    kinds = [each["kind"] for each in made]
    assert kinds[:3] == ["Namespace", "CustomResourceDefinition", "ServiceAccount"]
    assert sorted(kinds) == sorted(["Namespace", *(each["kind"] for each in objects("default"))])
    assert "helm" not in chart_tools.INSTALL.read_text().lower().replace("helmrelease", "")


# values.yaml, its schema and the templates say the same


def _schema_leaves(node: Object, path: str = "") -> set[str]:
    if "properties" not in node:
        return {path}
    return {leaf for name, child in node["properties"].items() for leaf in _schema_leaves(child, f"{path}.{name}")}


def test_every_value_has_a_schema_and_every_schema_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = {f".{path}" for path, _, _ in documented_values()}
    assert _schema_leaves(schema) - {".global"} == values


def test_every_value_is_used_by_a_template() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path, _, _ in documented_values():
        parents = [".Values." + ".".join(path.split(".")[:depth]) for depth in range(1, path.count(".") + 2)]
        used = f"{parents[-1]}" in templates or f"toYaml {parents[0]} " in templates
        assert used, f"{path} is used nowhere"
