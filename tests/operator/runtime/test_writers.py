"""Somebody else writes what the operator writes: put back once, told, and never fought over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from forebay_operator.act.truce import Truce, Writer, writers_of
from support.fake_cluster import simulated_model as model
from support.fake_kube import Object, clone
from support.reconcile_bench import Bench

REPLICAS = {"f:spec": {"f:replicas": {}}}


def write(bench: Bench, name: str, manager: str, fields: Object, **entry: Any) -> None:
    """As another client writes a Deployment's spec."""
    obj = clone(bench.api.find("deployments", name))
    obj["spec"].update(fields)
    owned = {"f:spec": {f"f:{field}": {} for field in fields}}
    entry = {"manager": manager, "operation": "Update", "time": bench.now.isoformat(), "fieldsV1": owned, **entry}
    obj["metadata"]["managedFields"] = [entry]
    bench.api.put(obj)


async def test_kubectl_scale_is_put_back_and_told(bench: Bench) -> None:
    bench.put(model(1, 2))
    await bench.rest()
    name = bench.deployment("decode")["metadata"]["name"]
    write(bench, name, "kubectl", {"replicas": 4}, subresource="scale")
    bench.cluster.control()
    await bench.rest()
    assert bench.deployment("decode")["spec"]["replicas"] == 2
    (note,) = [e["note"] for e in bench.api.all("events") if e["reason"] == "ForeignWriter"]
    assert f"Deployment {name}: spec.replicas was set to 4 by kubectl" in note
    assert "scale the DisaggregatedModel" in note
    assert bench.condition("ForeignWriter") == ("False", "SoleWriter"), "once is no fight"


async def test_an_autoscaler_on_a_child_is_not_fought(bench: Bench) -> None:
    bench.put(model(1, 2))
    await bench.rest()
    name = bench.deployment("decode")["metadata"]["name"]
    ours: list[int] = []
    for _ in range(12):
        # An HPA looks every 15 s, and writes when it finds another count than its own.
        if bench.deployment("decode")["spec"]["replicas"] != 3:
            write(bench, name, "kube-controller-manager", {"replicas": 3}, subresource="scale")
            bench.cluster.control()
        before = len(bench.api.calls)
        for _ in range(8):
            await bench.once()
        ours.append(sum(c.write and c.name == name for c in bench.api.calls[before:]))
        bench.now += timedelta(seconds=10)
    assert bench.condition("ForeignWriter") == ("True", "Contested")
    message = bench.message("ForeignWriter")
    assert name in message
    assert "kube-controller-manager" in message
    assert "scale the DisaggregatedModel" in message
    assert bench.deployment("decode")["spec"]["replicas"] == 3, "it has its way meanwhile"
    assert bench.condition("Ready")[0] == "True"
    assert bench.live()["memory"]["homes"]["decode"] == 2, "what the model says is not forgotten"
    assert sum(ours[4:]) <= 1, "after the first rounds nothing more is written"
    bench.now += timedelta(hours=7)
    await bench.rest()
    assert bench.deployment("decode")["spec"]["replicas"] == 2, "once the other has gone, the count is ours again"
    assert bench.condition("ForeignWriter") == ("False", "SoleWriter")


async def test_nobody_contests_what_is_not_there_any_more(bench: Bench) -> None:
    bench.put(model(1, 2))
    await bench.rest()
    name = bench.deployment("decode")["metadata"]["name"]
    for turn in range(6):
        write(bench, name, "kube-controller-manager", {"replicas": 3}, subresource="scale", time=str(turn))
        bench.cluster.control()
        for _ in range(4):
            await bench.once()
    assert bench.condition("ForeignWriter") == ("True", "Contested")
    bench.put(model(1, 2, engine={"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}}))
    await bench.rest()
    assert bench.api.find("deployments", name) is None
    assert bench.condition("ForeignWriter") == ("False", "SoleWriter")
    assert bench.reconciler._children.wake(("llm", "assistant")) is None


async def test_a_field_that_another_controller_keeps_writing(bench: Bench) -> None:
    bench.put(model(1, 2))
    await bench.rest()
    name = bench.deployment("decode")["metadata"]["name"]
    puts = 0
    for turn in range(15):
        if bench.deployment("decode")["spec"]["progressDeadlineSeconds"] != 5:
            write(bench, name, "policy-bot", {"progressDeadlineSeconds": 5}, time=str(turn))
            puts += 1
        for _ in range(4):
            await bench.once()
        bench.now += timedelta(seconds=10)
    assert puts <= 3, "put back, and then left"
    assert bench.condition("ForeignWriter") == ("True", "Contested")
    assert "policy-bot" in bench.message("ForeignWriter")
    bench.put(model(1, 2, drain={"timeoutSeconds": 77}))
    await bench.rest()
    new = [d for d in bench.api.all("deployments") if "decode" in d["metadata"]["name"]]
    assert [d["metadata"]["name"] != name for d in new] == [True], "a change of the spec is carried out all the same"


def test_a_truce_grows_and_ends() -> None:
    truce = Truce()
    about, now = "x", 1000.0
    assert truce.seen(about, (Writer("hpa", "1"),), now)
    assert not truce.seen(about, (Writer("hpa", "1"),), now + 1), "the same write is no news"
    assert not truce.holds(about, now + 1)
    spans = []
    for round_ in range(2, 9):
        now += 1
        assert truce.seen(about, (Writer("hpa", str(round_)),), now)
        spans.append(truce.left(now))
        now += spans[-1] or 0.0
        assert not truce.holds(about, now)
    assert not truce.holds(about, now - 9000), "a clock that was set back makes it no longer"
    assert spans == [600.0, 1200.0, 2400.0, 3600.0, 3600.0, 3600.0, 3600.0]
    assert truce.managers(about) == ("hpa",)
    now += 7 * 3600
    assert not truce.seen(about, (), now)
    assert truce.seen(about, (Writer("hpa", "99"),), now)
    assert not truce.holds(about, now), "forgiven"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"manager": "kubectl", "subresource": "scale", "time": "t", "fieldsV1": REPLICAS}, (Writer("kubectl", "t"),)),
        ({"manager": "kubectl-edit", "time": "t", "fieldsV1": REPLICAS}, (Writer("kubectl-edit", "t"),)),
        ({"manager": "forebay-operator", "time": "t", "fieldsV1": REPLICAS}, ()),
        ({"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:status": {}}}, ()),
        ({"manager": "kubectl", "fieldsV1": {"f:spec": {"f:paused": {}}}}, ()),
        ({"manager": "kubectl"}, ()),
    ],
)
def test_writers_are_read_off_managed_fields(entry: Object, expected: tuple[Writer, ...]) -> None:
    assert writers_of({"metadata": {"managedFields": [entry]}}, ("spec", "replicas")) == expected


FOREIGN = {
    "services": ("v1", "Service", "assistant-router"),
    "secrets": ("v1", "Secret", "assistant-token"),
    "serviceaccounts": ("v1", "ServiceAccount", "assistant-router"),
    "roles": ("rbac.authorization.k8s.io/v1", "Role", "assistant-router"),
    "rolebindings": ("rbac.authorization.k8s.io/v1", "RoleBinding", "assistant-router"),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget", "assistant-decode"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy", "assistant-workers"),
    "deployments": ("apps/v1", "Deployment", "assistant-router"),
}


@pytest.mark.parametrize("plural", list(FOREIGN))
async def test_a_foreign_object_of_a_childs_name_is_never_touched(bench: Bench, plural: str) -> None:
    version, kind, name = FOREIGN[plural]
    meta = {"name": name, "namespace": "llm", "labels": {"forebay.dev/model": "assistant"}}
    theirs: Object = {"apiVersion": version, "kind": kind, "metadata": meta, "spec": {"theirs": True, "replicas": 0}}
    bench.api.on_write = None
    held = clone(bench.api.put(theirs))
    bench.put(model())
    await bench.rest()
    assert bench.api.find(plural, name) == held
    assert bench.condition("Stalled") == ("True", "ForeignObject")
    assert f"{kind} llm/{name}" in bench.message("Stalled")
    assert "rename the model" in bench.message("Stalled")
    bench.put(model(1, 2, networkPolicy="Disabled"))
    await bench.rest()
    assert bench.api.find(plural, name) == held, "nor deleted as a left-over"
    bench.api.remove(plural, name)
    bench.now += timedelta(minutes=1)
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"


def test_writes_without_a_time_are_told_apart_by_the_generation() -> None:
    """As the API server keeps the scale subresource's while our value was the same."""
    entry = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale", "fieldsV1": REPLICAS}

    def found(generation: int) -> tuple[Writer, ...]:
        return writers_of({"metadata": {"generation": generation, "managedFields": [entry]}}, ("spec", "replicas"))

    truce = Truce()
    assert truce.seen("count", found(4), 0.0)
    assert not truce.seen("count", found(4), 5.0)
    assert not truce.holds("count", 5.0)
    assert truce.seen("count", found(6), 10.0)
    assert truce.holds("count", 10.0)
