"""Pod templates: where a spec's words end up, what restricted pod security sees, and how a pod leaves."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_operator.api.labels import POOLS
from forebay_operator.build import ports
from forebay_operator.build.router import router_template
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.build.worker import worker_deployment, worker_template
from support.manifests import make_model
from support.pod_security import violations


@pytest.mark.parametrize(
    ("changes", "exceptions"),
    [
        ({}, set()),
        ({"engine.type": "Simulated", "model.source": ...}, set()),
        ({"model.source": "cache://smollm2-135m"}, set()),
        ({"model.source": "image://a:1"}, set()),
        ({"model.source": "hostpath:///srv"}, {"volume hostPath"}),
        ({"transfer.rdma": {}}, {"capability IPC_LOCK"}),
        ({"transfer.transport": "RDMA"}, {"capability IPC_LOCK"}),
        ({"transfer.transport": "TCP"}, set()),
    ],
)
def test_pods_are_restricted_but_for_documented_exceptions(changes: dict[str, Any], exceptions: set[str]) -> None:
    model = make_model(changes)
    for pool in POOLS:
        assert violations(worker_template(model, pool)["spec"]) == exceptions
    assert violations(router_template(model)["spec"]) == set()


def test_the_checker_sees_an_unrestricted_pod() -> None:
    assert violations({"containers": [{}], "volumes": [{"name": "a", "hostPath": {}}], "hostNetwork": True}) == {
        "hostNetwork",
        "volume hostPath",
        "allowPrivilegeEscalation",
        "runAsNonRoot",
        "seccompProfile",
        "capabilities not dropped",
    }


@pytest.mark.parametrize("changes", [{}, {"model.source": "cache://smollm2-135m"}])
def test_root_file_systems_are_read_only_and_tmp_is_not(changes: dict[str, Any]) -> None:
    model = make_model(changes)
    for template in (worker_template(model, "decode"), router_template(model)):
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", ())):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert any(mount["mountPath"] == "/tmp" for mount in container["volumeMounts"])


def test_workers_have_no_api_token_and_routers_have_one() -> None:
    assert worker_template(make_model(), "prefill")["spec"]["automountServiceAccountToken"] is False
    router = router_template(make_model())["spec"]
    assert (router["serviceAccountName"], router["automountServiceAccountToken"]) == ("assistant-router", True)
    local = router_template(make_model(), discovery="File")["spec"]
    assert "serviceAccountName" not in local


@pytest.mark.parametrize("seconds", [1, 900])
def test_the_grace_period_holds_pause_and_drain(seconds: int) -> None:
    model = make_model({"drain.timeoutSeconds": seconds})
    for template in (worker_template(model, "decode"), router_template(model)):
        pod = template["spec"]
        container = pod["containers"][0]
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert f"--drain-timeout-seconds={seconds}" in container["args"]
        assert pod["terminationGracePeriodSeconds"] >= pause + seconds + 10


PINNED: dict[str, Any] = {
    "decode.gpus": {"resource": "amd.com/gpu", "count": 4},
    "decode.nodeSelector": {"gpu": "mi300"},
    "decode.tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "decode.affinity": {"nodeAffinity": {"x": 1}},
    "decode.topologySpreadConstraints": [{"topologyKey": "zone"}, {"topologyKey": "rack", "labelSelector": {}}],
    "decode.priorityClassName": "high",
    "decode.runtimeClassName": "rocm",
    "transfer": {"transport": "RDMA", "rdma": {"resource": "rdma/ib", "count": 2, "networks": ["rail-0", "n/rail-1"]}},
}


def test_pinning_reaches_the_pods_of_its_pool_and_no_other() -> None:
    model = make_model(PINNED)
    template = worker_template(model, "decode")
    pod = template["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "4", "rdma/ib": "2"}
    assert pod["nodeSelector"] == {"gpu": "mi300"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["affinity"] == {"nodeAffinity": {"x": 1}}
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("high", "rocm")
    spread = pod["topologySpreadConstraints"]
    assert spread[0]["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert spread[1]["labelSelector"] == {}
    assert template["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "rail-0,n/rail-1"}

    other = worker_template(model, "prefill")["spec"]
    assert other["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/ib": "2"}
    assert not {"nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName"} & set(other)


def test_a_worker_without_a_gpu_gets_memory_for_its_cache_and_still_its_rdma_device() -> None:
    model = make_model({"decode.gpus": {"count": 0}, "transfer.rdma": {}, "engine.kvCache": {"memory": "3Gi"}})
    resources = worker_template(model, "decode")["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "1", "memory": "5Gi"}, "limits": {"rdma/hca": "1"}}


@pytest.mark.parametrize(
    ("source", "volume", "directory"),
    [
        ("pvc://c/a/b", {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}, "/models/a/b"),
        ("image://a/b:1", {"image": {"reference": "a/b:1"}}, "/models"),
        ("hostpath:///srv/m", {"hostPath": {"path": "/srv/m", "type": "Directory"}}, "/models"),
        ("cache://smollm2-135m", {"emptyDir": {}}, "/models/model"),
    ],
)
def test_model_sources_are_mounted_read_only(source: str, volume: dict[str, Any], directory: str) -> None:
    pod = worker_template(make_model({"model.source": source}), "decode")["spec"]
    container = pod["containers"][0]
    assert {"name": "model", **volume} in pod["volumes"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert {"name": "MODEL_DIR", "value": directory} in container["env"]


def test_images_come_from_the_model_then_the_settings_then_the_release() -> None:
    def image(changes: dict[str, Any], surroundings: Surroundings) -> str:
        template = worker_template(make_model(changes), "decode", surroundings=surroundings)
        return str(template["spec"]["containers"][0]["image"])

    settings = Surroundings(engine_image="mirror/engine:2")
    assert image({"engine.image": "mine:1"}, settings) == "mine:1"
    assert image({}, settings) == "mirror/engine:2"
    assert image({}, Surroundings()).startswith("forebay-engine:")


def test_ucx_listens_where_the_policies_let_it() -> None:
    env = {e["name"]: e.get("value") for e in worker_template(make_model(), "decode")["spec"]["containers"][0]["env"]}
    assert env["UCX_TCP_PORT_RANGE"] == f"{ports.UCX_TCP_FIRST}-{ports.UCX_TCP_LAST}"
    simulated = make_model({"engine.type": "Simulated"})
    names = {e["name"] for e in worker_template(simulated, "decode")["spec"]["containers"][0]["env"]}
    assert "UCX_TCP_PORT_RANGE" not in names


def test_a_pod_template_may_bring_a_claimed_device_and_take_a_limit_away() -> None:
    patch = {
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}],
            "containers": [
                {"name": "engine", "resources": {"limits": {"$patch": "delete"}, "claims": [{"name": "gpu"}]}}
            ],
        }
    }
    pod = worker_template(make_model({"decode.podTemplate": patch}), "decode")["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "h100"}]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "2"},
        "claims": [{"name": "gpu"}],
    }
    assert pod["containers"][0]["command"] == ["forebay-engine"]


def test_a_slow_model_is_not_called_failed_while_it_loads() -> None:
    spec = worker_deployment(make_model(), "decode", replicas=1)["spec"]
    startup = spec["template"]["spec"]["containers"][0]["startupProbe"]
    assert spec["progressDeadlineSeconds"] > startup["failureThreshold"] * startup["periodSeconds"]
