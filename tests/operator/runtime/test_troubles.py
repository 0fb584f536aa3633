"""What only the operator can judge: each trouble ends in a condition that names object and remedy, leaves alone what
runs, and clears by itself."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forebay_operator.queue import RetryAfter
from support.fake_cluster import native_model
from support.fake_cluster import simulated_model as model
from support.fake_kube import Call, Object, Refused, clone
from support.reconcile_bench import Bench

NEW = {"type": "Simulated", "image": "engine:2", "kvCache": {"memory": "1Gi"}}


def pending(message: str) -> Object:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [scheduled]}


def waiting(reason: str, message: str = "") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    last = {"terminated": {"exitCode": 1, "reason": "Error"}}
    container = {"name": "engine", "image": "engine:2", "state": state, "lastState": last}
    return {"phase": "Pending", "podIP": "10.97.0.1", "containerStatuses": [container]}


def not_set_up(since: str) -> Object:
    """As a kubelet leaves a pod whose volume it can't mount: why is in Events alone."""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    started = {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": since}
    container = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}
    return {"phase": "Pending", "conditions": [scheduled, started], "containerStatuses": [container]}


def refuses(plural: str, status: int, message: str) -> Callable[[Call], None]:
    def before(call: Call) -> None:
        if call.write and call.plural == plural:
            raise Refused(status, "Refused", message)

    return before


@dataclass
class Trouble:
    condition: str
    reason: str
    words: tuple[str, ...]
    """Of the message: the object and the remedy among them."""

    pods: Object | None = None
    controllers: str = ""
    server: Callable[[Call], None] | None = None
    rolls: bool = False
    """It holds up no worker."""


TROUBLES = {
    "unknown claim": Trouble(
        "Stalled",
        "MissingObject",
        ("Pod llm/assistant-", 'persistentvolumeclaim "models" not found', "create it or correct its name"),
        pods=pending('0/2 nodes are available: persistentvolumeclaim "models" not found.'),
    ),
    "wrong Secret in an env": Trouble(
        "Stalled",
        "MissingObject",
        ("container engine", 'secret "hf" not found', "create it or correct its name"),
        pods=waiting("CreateContainerConfigError", 'secret "hf" not found'),
    ),
    "a volume that can't be mounted": Trouble(
        "Stalled",
        "VolumeFailed",
        ("Pod llm/assistant-", "its volumes or its network are not set up", "read the pod's events"),
        pods=not_set_up("2025-12-31T23:57:00Z"),
    ),
    "image pull": Trouble(
        "Stalled",
        "ImagePullFailed",
        ("container engine: image engine:2 can't be pulled", "imagePullSecret"),
        pods=waiting("ImagePullBackOff"),
    ),
    "crash at start": Trouble(
        "Stalled",
        "Crashing",
        ("container engine ended with exit code 1", "read the container's log"),
        pods=waiting("CrashLoopBackOff"),
    ),
    "unschedulable": Trouble(
        "PoolsAvailable",
        "BelowMinimum",
        ("Pod llm/assistant-", "Insufficient nvidia.com/gpu", "add nodes"),
        pods=pending("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
    ),
    "claim that is not bound": Trouble(
        "PoolsAvailable",
        "BelowMinimum",
        ("Pod llm/assistant-", "has unbound immediate PersistentVolumeClaims", "kubectl describe pvc"),
        pods=pending("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
    ),
    "quota for pods": Trouble(
        "Stalled",
        "QuotaExceeded",
        ("Deployment llm/assistant-", "exceeded quota: team", "raise the quota"),
        controllers='pods "assistant-x7k2p" is forbidden: exceeded quota: team, requested: pods=1',
    ),
    "admission webhook refuses pods": Trouble(
        "Stalled",
        "Rejected",
        ('admission webhook "policy" denied the request: no root', "the policy that refuses it"),
        controllers='admission webhook "policy" denied the request: no root',
    ),
    "admission webhook refuses a child": Trouble(
        "Stalled",
        "Rejected",
        ("Deployment assistant-", 'admission webhook "policy" denied the request', "change the spec or podTemplate"),
        server=refuses("deployments", 400, 'admission webhook "policy" denied the request: labels'),
    ),
    "quota for Services": Trouble(
        "Stalled",
        "QuotaExceeded",
        ("Service assistant-router", "exceeded quota", "raise the quota"),
        server=refuses("services", 403, 'services "assistant-router" is forbidden: exceeded quota: team'),
        rolls=True,
    ),
    "a child that is too large": Trouble(
        "Stalled",
        "Rejected",
        ("Deployment assistant-", "Request entity too large", "change the spec or podTemplate"),
        server=refuses("deployments", 413, "Request entity too large: limit is 3145728"),
    ),
    "namespace that is being deleted": Trouble(
        "Stalled",
        "NamespaceTerminating",
        ("Deployment assistant-", "because it is being terminated", "the model goes with it"),
        server=refuses(
            "deployments", 403, "unable to create new content in namespace llm because it is being terminated"
        ),
    ),
}


@pytest.mark.parametrize("name", list(TROUBLES))
async def test_a_trouble_is_a_condition_and_clears(bench: Bench, name: str) -> None:
    trouble = TROUBLES[name]
    bench.put(model(1, 2))
    await bench.rest()
    before = [pod["metadata"]["name"] for pod in bench.cluster.workers()]
    bench.cluster.broken, bench.cluster.refusal, bench.api.before = trouble.pods, trouble.controllers, trouble.server
    bench.put(model(1, 2, engine=NEW, router={"replicas": 1, "serviceType": "NodePort"}))
    for _ in range(80):
        await bench.once()
    assert bench.condition(trouble.condition)[1] == trouble.reason, bench.live()["conditions"]
    message = bench.message(trouble.condition)
    for words in trouble.words:
        assert words in message
    assert bench.condition("Ready")[0] == "True", "the running revision keeps serving"
    left = [pod["metadata"]["name"] for pod in bench.cluster.workers()]
    assert trouble.rolls or len(set(before) & set(left)) >= 2, "and no more of it is taken than a rollout may"
    version = bench.api.last_version
    for _ in range(10):
        await bench.once()
    assert bench.api.last_version == version, "the trouble is told once, not with every look"
    bench.api.before = None
    bench.cluster.cure()
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.condition("PoolsAvailable") == ("True", "AtTarget")
    assert {pod["spec"]["containers"][0]["image"] for pod in bench.cluster.workers()} == {"engine:2"}


KEYS: dict[str, Any] = {"router": {"replicas": 1, "apiKeysSecretRef": {"name": "clients", "key": "keys"}}}


async def test_a_secret_that_the_spec_names(bench: Bench) -> None:
    """Pods that wait for it say so in Events only, so it is asked for by name."""
    bench.put(model(1, 1, **KEYS))
    wait = 0.0
    for _ in range(20):
        wait = await bench.once() or 0.0
    assert bench.condition("Stalled") == ("True", "MissingObject")
    assert "Secret llm/clients: it is not there, and spec.router.apiKeysSecretRef names it" in bench.message("Stalled")
    assert wait <= 30.0, "it is looked for again"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "clients", "namespace": "llm"}}
    bench.api.put({**secret, "data": {"other": "c2VjcmV0"}})
    await bench.once()
    assert "it has no key keys" in bench.message("Stalled")
    assert "c2VjcmV0" not in str(bench.live()), "values are never shown"
    bench.api.put({**secret, "data": {"keys": "c2VjcmV0"}})
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"


@pytest.mark.parametrize(
    "volume",
    [
        {"secret": {"secretName": "tls"}},
        {"projected": {"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "tls"}}]}},
    ],
    ids=["secret", "projected"],
)
@pytest.mark.parametrize("part", ["prefill", "decode", "router"])
async def test_a_secret_that_a_pod_template_mounts(bench: Bench, part: str, volume: Object) -> None:
    optional = {"secret": {"secretName": "other", "optional": True}}
    volumes = [{"name": "v", **volume}, {"name": "o", **optional}, {"name": "e", "emptyDir": {}}]
    made = model(1, 1)
    made["spec"].setdefault(part, {})["podTemplate"] = {"spec": {"volumes": volumes}}
    bench.put(made)
    await bench.rest()
    assert bench.condition("Stalled") == ("True", "MissingObject")
    message = bench.message("Stalled")
    assert f"Secret llm/tls: it is not there, and spec.{part}.podTemplate names it" in message
    assert "other" not in message
    bench.api.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls", "namespace": "llm"}})
    bench.now += timedelta(seconds=30)
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_slow_volume_is_no_trouble_yet(bench: Bench) -> None:
    bench.cluster.broken = not_set_up("2026-01-01T00:00:00Z")
    bench.put(model(1, 1))
    for _ in range(20):
        await bench.once()
        assert bench.now < datetime(2026, 1, 1, 0, 2, tzinfo=UTC)
        assert bench.condition("Stalled")[0] == "False"
        if bench.now > datetime(2026, 1, 1, 0, 1, 50, tzinfo=UTC):
            break
    bench.now = datetime(2026, 1, 1, 0, 2, 1, tzinfo=UTC)
    await bench.once()
    assert bench.condition("Stalled") == ("True", "VolumeFailed")


@pytest.mark.parametrize(
    ("asked", "used", "serves"),
    [("RDMA", "TCP", False), ("RDMA", "SharedMemory", False), ("RDMA", "RDMA", True), ("RDMA", "NVLink", True),
     ("RDMA", "Unknown", True), ("TCP", "TCP", True)],
)  # fmt: skip
async def test_a_required_transport(bench: Bench, asked: str, used: str, serves: bool) -> None:
    """Never Ready on a worse one, by the workers' own account; what is not known yet is not worse."""
    bench.cluster.transport = used
    bench.put(native_model(1, 1, transfer={"transport": asked, "required": True}))
    for _ in range(30):
        await bench.once()
    assert bench.condition("Ready")[0] == str(serves)
    if serves:
        assert bench.condition("Stalled")[0] == "False"
        return
    assert bench.condition("TransportReady") == ("False", "TransportUnavailable")
    assert bench.condition("Stalled") == ("True", "TransportUnavailable")
    assert f"KV moves over {used}, and transfer.required asks for {asked}" in bench.message("Stalled")
    assert "give the pods a device (transfer.rdma)" in bench.message("TransportReady")
    bench.cluster.transport = asked
    await bench.rest()
    assert bench.condition("Ready")[0] == "True"
    assert bench.condition("TransportReady") == ("True", "AsAsked")


async def test_a_transport_that_is_only_asked_for(bench: Bench) -> None:
    bench.cluster.transport = "TCP"
    bench.put(native_model(1, 1, transfer={"transport": "RDMA"}))
    await bench.rest()
    assert bench.condition("Ready")[0] == "True"
    assert bench.condition("TransportReady") == ("False", "WorseThanAsked")


async def test_a_deleted_token_comes_back_with_its_value(bench: Bench) -> None:
    bench.put(model(1, 1))
    await bench.rest()
    before = bench.api.find("secrets", "assistant-token")
    bench.api.remove("secrets", "assistant-token")
    bench.now += timedelta(seconds=30)
    await bench.once()
    after = bench.api.find("secrets", "assistant-token")
    assert before is not None
    assert after is not None
    assert after["data"] == before["data"], "running pods know no other"


async def test_the_token_of_a_model_made_anew_is_never_a_known_one(bench: Bench) -> None:
    """The garbage collector takes the Secret of the deleted model between two reads of it."""
    bench.put(model(1, 1))
    await bench.rest()
    old = clone(bench.api.find("secrets", "assistant-token"))
    bench.api.remove("disaggregatedmodels", "assistant")
    bench.api.put(old)
    bench.put(model(1, 1))
    reads = 0

    def before(call: Call) -> None:
        nonlocal reads
        if call.verb == "get" and call.plural == "secrets":
            reads += 1
            if reads == 2:
                bench.api.remove("secrets", "assistant-token")

    bench.api.before = before
    await bench.rest()
    assert reads >= 2
    token = base64.b64decode(clone(bench.api.find("secrets", "assistant-token"))["data"]["token"])
    assert len(set(token)) > 4, token
    assert token != base64.b64decode(old["data"]["token"])


@pytest.mark.parametrize("status", [410, 429, 500])
async def test_an_api_server_in_trouble_is_waited_for(bench: Bench, status: int) -> None:
    bench.put(model(1, 1))
    await bench.rest()
    bench.put(model(1, 2))
    left = 7

    def before(call: Call) -> None:
        nonlocal left
        if left and call.plural == "deployments":
            left -= 1
            raise Refused(status, "Refused", headers={"Retry-After": "3"} if status == 429 else {})

    bench.api.before = before
    with pytest.raises(RetryAfter) as error:
        await bench.once()
    assert error.value.seconds == (3.0 if status == 429 else 0.0)
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 2}
    assert bench.condition("Ready")[0] == "True"


async def test_a_name_of_63_characters(bench: Bench) -> None:
    name = "a" * 62 + "z"
    made = model(1, 2, name=name)
    bench.api.put(made)
    for _ in range(30):
        await bench.reconciler.reconcile(("llm", name))
    names = [(plural, key) for plural, _, key in bench.api.objects if plural not in ("events", "pods", "replicasets")]
    assert all(len(key) <= 63 for _, key in names), names
    assert len(set(names)) == len(names)
    assert bench.cluster.roles() == {"prefill": 1, "decode": 2}
    held = bench.api.find("disaggregatedmodels", name)
    assert held is not None
    ready = next(c for c in held["status"]["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "True"


async def test_conditions_of_others_stay_theirs(bench: Bench) -> None:
    bench.put(model(1, 1))
    await bench.rest()
    held = bench.api.find("disaggregatedmodels", "assistant")
    assert held is not None
    theirs = {"type": "example.com/Approved", "status": "True", "reason": "ByHand", "message": "",
              "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1}  # fmt: skip
    status = {**held["status"], "conditions": [*held["status"]["conditions"], theirs]}
    bench.api.put({**held, "status": status})
    calls = len(bench.api.writes())
    for _ in range(5):
        await bench.once()
    assert len(bench.api.writes()) == calls, "nothing of ours has changed"
    bench.put(model(1, 2))
    await bench.rest()
    applied = [call.body["status"]["conditions"] for call in bench.api.writes() if call.subresource == "status"]
    assert all(condition["type"] != theirs["type"] for condition in applied[-1])
