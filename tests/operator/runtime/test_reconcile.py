"""Reconcile against the fake API server with controllers: what becomes of a model, and of every interruption."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from forebay_operator import reconcile
from forebay_operator.api import labels
from forebay_operator.observe.types import LatencyView
from forebay_operator.queue import RetryAfter
from support.fake_cluster import native_model
from support.fake_cluster import simulated_model as model
from support.fake_kube import Call, FakeApi, Object, Refused, clone
from support.reconcile_bench import Bench


def kinds(api: FakeApi) -> dict[str, int]:
    found: dict[str, int] = {}
    for plural, _, _ in api.objects:
        if plural not in ("pods", "events", "replicasets", "disaggregatedmodels"):
            found[plural] = found.get(plural, 0) + 1
    return found


async def test_a_model_becomes_its_children_and_comes_to_rest(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    assert kinds(bench.api) == {
        "deployments": 3,
        "services": 1,
        "secrets": 1,
        "serviceaccounts": 1,
        "roles": 1,
        "rolebindings": 1,
        "poddisruptionbudgets": 2,
        "networkpolicies": 2,
    }
    assert bench.cluster.roles() == {"prefill": 1, "decode": 2}
    assert bench.live()["observedGeneration"] == 1
    assert bench.live()["prefill"]["target"] == 1
    assert bench.condition("Ready")[0] == "True"
    for obj in bench.api.objects.values():
        if obj["kind"] in ("Deployment", "Secret", "NetworkPolicy"):
            assert [r["kind"] for r in obj["metadata"]["ownerReferences"]] == [labels.KIND]
    writes = len(bench.api.writes())
    for _ in range(5):
        wait = await bench.once()
        assert wait is not None
        assert 45 <= wait <= 75, "no watch brings what routers say: latency, transport"
    assert len(bench.api.writes()) == writes, "at rest nothing is written"
    bench.restart()
    version = bench.api.last_version
    await bench.rest()
    assert bench.api.last_version == version, "a restart changes nothing"


@pytest.mark.parametrize("left", [LatencyView(), None], ids=["no request in the window", "no router answers"])
async def test_figures_of_a_status_go_when_traffic_ends(bench: Bench, left: LatencyView | None) -> None:
    bench.cluster.latency = LatencyView(640, 31, 99)
    bench.put(model())
    await bench.rest()
    assert bench.live()["latency"]["attainmentPercent"] == 99
    bench.cluster.latency = left
    await bench.rest()
    assert "latency" not in bench.live()
    bench.put(model(1, 1))
    await bench.rest()
    assert bench.live()["observedGeneration"] == 2


async def test_a_status_that_the_server_leaves_as_it_is_is_awaited_from_no_watch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others own stays though we leave it out: no change, no event of it, and no dead watch."""
    bench.put(model())
    await bench.rest()
    held = copy.deepcopy(bench.api.find("disaggregatedmodels", "assistant"))
    assert held is not None
    wrote: list[str] = []
    monkeypatch.setattr(bench.reconciler, "_wrote", lambda key, version: wrote.append(version))
    held["status"]["summary"] = "of another"
    bench.api.put(held)
    theirs = copy.deepcopy(bench.api.find("disaggregatedmodels", "assistant"))

    async def unmoved(*_: Any, **__: Any) -> Object | None:
        return theirs

    with monkeypatch.context() as patched:
        patched.setattr(bench.reconciler._kube, "apply", unmoved)
        await bench.once()
    assert wrote == []
    await bench.once()
    assert len(wrote) == 1, "one that it does change is"


async def test_an_operation_that_cannot_be_recorded_is_not_tried_without_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put(model(1, 3))
    await bench.rest()
    bench.put(model(1, 2))
    theirs = copy.deepcopy(bench.api.find("disaggregatedmodels", "assistant"))

    async def unmoved(*_: Any, **__: Any) -> Object | None:
        return theirs

    with monkeypatch.context() as patched:
        patched.setattr(bench.reconciler._kube, "apply", unmoved)
        wait = await bench.once()
        assert wait is not None
        assert wait >= 10.0
    assert not [p for p in bench.cluster.workers() if labels.DRAINING in p["metadata"]["labels"]], "the record first"
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 2}


async def test_children_of_a_deleted_model_go_and_nothing_is_remembered(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    bench.api.remove("disaggregatedmodels", "assistant")
    assert await bench.once() is None
    assert {p for p, _, _ in bench.api.objects} <= {"events"}
    assert b'model="assistant"' not in bench.metrics.text()
    assert len(bench.reconciler._applier.cache) == 0
    assert not bench.reconciler._applier._applied
    assert not bench.reconciler._actuator._tokens
    bench.put(model())
    await bench.rest()
    assert kinds(bench.api)["deployments"] == 3


async def test_a_deployment_that_went_without_a_word_is_made_again(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    name = bench.deployment("decode")["metadata"]["name"]
    del bench.api.objects["deployments", "llm", name]
    await bench.rest()
    assert bench.api.find("deployments", name) is not None


async def test_scale_in_loses_no_request(bench: Bench) -> None:
    bench.put(model(1, 4))
    await bench.rest()
    busy = [p["metadata"]["name"] for p in bench.cluster.workers("decode")]
    bench.cluster.running = {busy[0]: 4, busy[1]: 1, busy[2]: 9, busy[3]: 2}
    bench.put(model(1, 2))
    for _ in range(12):
        await bench.once()
    fenced = [p for p in bench.cluster.workers() if labels.DRAINING in p["metadata"]["labels"]]
    assert [p["metadata"]["name"] for p in fenced] == [busy[1]], "the one with least work, and no other yet"
    assert bench.live()["operation"]["pod"] == busy[1]
    assert not bench.cluster.deleted
    bench.cluster.running[busy[1]] = 0
    for _ in range(20):
        await bench.once()
    assert [pod["metadata"]["name"] for pod, _ in bench.cluster.deleted] == [busy[1]]
    bench.cluster.running[busy[3]] = 0
    await bench.rest()
    assert [(pod["metadata"]["name"], n) for pod, n in bench.cluster.deleted] == [(busy[1], 0), (busy[3], 0)]
    assert "operation" not in bench.live()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 2}
    reasons = [e["reason"] for e in bench.api.all("events")]
    assert reasons.count("WorkerLeaves") == reasons.count("WorkerLeft") == 2


async def test_a_worker_that_never_runs_empty_goes_at_the_deadline(bench: Bench) -> None:
    bench.put(model(1, 2, drain={"timeoutSeconds": 30}))
    await bench.rest()
    for pod in bench.cluster.workers("decode"):
        bench.cluster.running[pod["metadata"]["name"]] = 3
    started = bench.now
    bench.put(model(1, 1, drain={"timeoutSeconds": 30}))
    await bench.rest()
    ((victim, left),) = bench.cluster.deleted
    assert left == 0
    assert bench.cluster.moved == {victim["metadata"]["name"]: 3}, "what was left continues elsewhere"
    assert timedelta(seconds=30) <= bench.now - started <= timedelta(seconds=60)


async def test_drain_policy_move_waits_for_nobody(bench: Bench) -> None:
    move = {"policy": "Move", "timeoutSeconds": 600}
    bench.put(model(1, 2, drain=move))
    await bench.rest()
    for pod in bench.cluster.workers("decode"):
        bench.cluster.running[pod["metadata"]["name"]] = 3
    started = bench.now
    bench.put(model(1, 1, drain=move))
    await bench.rest()
    assert list(bench.cluster.moved.values()) == [3]
    assert bench.now - started <= timedelta(seconds=15)


async def test_workers_that_do_not_answer_hold_up_nothing_for_ever(bench: Bench) -> None:
    bench.put(model(1, 2, drain={"timeoutSeconds": 30}))
    await bench.rest()
    bench.cluster.deaf = True
    bench.put(model(1, 1, drain={"timeoutSeconds": 30}))
    await bench.rest()
    ((victim, _),) = bench.cluster.deleted
    assert victim["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "-1000"


async def test_rollout_and_rollback_on_a_full_cluster(bench: Bench) -> None:
    bench.put(model(1, 1))
    await bench.rest()
    first = {d["metadata"]["name"] for d in bench.api.all("deployments")}
    changed = model(1, 1, engine={"type": "Simulated", "image": "engine:2", "kvCache": {"memory": "1Gi"}})
    most = 0

    def watch() -> None:
        nonlocal most
        bench.cluster.control()
        most = max(most, len(bench.cluster.workers()))

    bench.api.on_write = watch
    bench.put(changed)
    await bench.rest()
    second = {d["metadata"]["name"] for d in bench.api.all("deployments")}
    assert len(first & second) == 1, "only the router's Deployment is the same"
    assert len(second) == 3
    assert most == 2
    assert bench.cluster.roles() == {"prefill": 1, "decode": 1}
    bench.put(model(1, 1))
    await bench.rest()
    assert {d["metadata"]["name"] for d in bench.api.all("deployments")} == first


async def test_a_new_revision_that_never_gets_ready_stops_the_rollout(bench: Bench) -> None:
    bench.put(model(1, 3))
    await bench.rest()
    bench.cluster.unready = True
    bench.put(model(1, 3, engine={"type": "Simulated", "image": "broken:1", "kvCache": {"memory": "1Gi"}}))
    for _ in range(60):
        await bench.once()
    serving = [p for p in bench.cluster.workers("decode") if bench.cluster.is_ready(p)]
    assert len(serving) >= 2


async def test_roles_follow_the_targets_in_status(bench: Bench) -> None:
    bench.put(model(2, 2))
    await bench.rest()
    held = copy.deepcopy(bench.api.find("disaggregatedmodels", "assistant"))
    assert held is not None
    held["status"]["prefill"]["target"], held["status"]["decode"]["target"] = 1, 3
    bench.api.put(held)
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}
    loaned = next(p for p in bench.cluster.workers("prefill") if p["metadata"]["labels"][labels.ROLE] == "decode")
    bench.cluster.kill(loaned["metadata"]["name"])
    bench.cluster.control()
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}, "its replacement takes its role over"
    assert bench.live()["prefill"]["onLoan"] == 1


async def test_the_roles_of_a_cordoned_node_are_elsewhere_before_its_pods_leave(bench: Bench) -> None:
    for name in ("node1", "node2"):
        bench.api.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {}})
    bench.put(model(1, 3))
    await bench.rest()
    (prefill,) = bench.cluster.workers("prefill")
    emptied = prefill["spec"]["nodeName"]
    bench.api.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": emptied}, "spec": {"unschedulable": True}})
    bench.now += timedelta(seconds=10)
    await bench.once()
    elsewhere = [
        p["metadata"]["labels"][labels.ROLE] for p in bench.cluster.workers() if p["spec"]["nodeName"] != emptied
    ]
    assert "prefill" in elsewhere, "before anything was evicted"
    assert bench.api.find("pods", prefill["metadata"]["name"]) is not None
    bench.cluster.kill(prefill["metadata"]["name"])
    bench.cluster.control()
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}


@pytest.mark.parametrize("operator", ["up", "down"])
async def test_a_pod_on_loan_that_is_evicted(bench: Bench, operator: str) -> None:
    bench.put(model(2, 2))
    await bench.rest()
    held = clone(bench.api.find("disaggregatedmodels", "assistant"))
    held["status"]["prefill"]["target"], held["status"]["decode"]["target"] = 1, 3
    bench.api.put(held)
    await bench.rest()
    loaned = next(p for p in bench.cluster.workers("prefill") if p["metadata"]["labels"][labels.ROLE] == "decode")
    if operator == "down":
        # Both of its pool's pods go while nobody looks.
        for pod in bench.cluster.workers("prefill"):
            bench.cluster.kill(pod["metadata"]["name"])
        bench.cluster.control()
        bench.restart()
    else:
        bench.cluster.kubelet = True
        bench.cluster.kill(loaned["metadata"]["name"])
        await bench.once()
        assert bench.cluster.roles()["decode"] == 3, "one that is leaving has its role until it is gone"
        bench.cluster.kubelet = False
        bench.api.remove("pods", loaned["metadata"]["name"])
        for pod in bench.cluster.workers():
            if not pod["status"]:
                bench.api.remove("pods", pod["metadata"]["name"])
        bench.cluster.control()
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}
    assert bench.live()["prefill"]["onLoan"] == 1


async def test_a_target_written_meanwhile_is_not_overwritten(bench: Bench) -> None:
    bench.put(model(2, 2))
    await bench.rest()
    bench.put(model(2, 2, drain={"timeoutSeconds": 30}))

    def before(call: Call) -> None:
        if call.subresource == "status":
            bench.api.before = None
            held = clone(bench.api.find("disaggregatedmodels", "assistant"))
            held["status"]["prefill"]["target"], held["status"]["decode"]["target"] = 1, 3
            bench.api.put(held)

    bench.api.before = before
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}


async def test_a_foreign_object_is_reported_and_cured(bench: Bench) -> None:
    theirs: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "assistant-router", "namespace": "llm"},
        "spec": {"selector": {"app": "theirs"}},
    }
    bench.api.put(theirs)
    bench.put(model())
    await bench.rest()
    held = bench.api.find("services", "assistant-router")
    assert held is not None
    assert held["spec"]["selector"] == {"app": "theirs"}
    assert bench.condition("Stalled") == ("True", "ForeignObject")
    assert kinds(bench.api)["deployments"] == 3, "the rest is made all the same"
    bench.api.remove("services", "assistant-router")
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"


async def test_what_a_person_changes_is_put_back_and_told(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    name = next(n for p, _, n in bench.api.objects if p == "deployments" and "decode" in n)
    changed = copy.deepcopy(bench.api.find("deployments", name))
    assert changed is not None
    changed["spec"]["template"]["spec"]["priorityClassName"] = "theirs"
    changed["spec"]["progressDeadlineSeconds"] = 5
    changed["metadata"]["managedFields"] = [
        {"manager": "kubectl-edit", "fieldsV1": {"f:spec": {"f:progressDeadlineSeconds": {}}}}
    ]
    bench.api.put(changed)
    await bench.rest()
    after = bench.api.find("deployments", name)
    assert after is not None
    assert after["spec"]["progressDeadlineSeconds"] != 5
    notes = [e["note"] for e in bench.api.all("events") if e["reason"] == "FieldOwnershipTaken"]
    assert len(notes) == 1
    assert "kubectl-edit: spec.progressDeadlineSeconds" in notes[0]


async def test_a_spec_only_the_operator_can_judge(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    before = bench.state()
    bench.put(model(router={"podTemplate": {"spec": {"priority": 1.5}}}))
    await bench.rest()
    assert bench.condition("Stalled") == ("True", "InvalidSpec")
    assert bench.live()["observedGeneration"] == 2
    assert bench.state()["replicas"] == before["replicas"], "what runs keeps running"
    bench.put(model())
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_fault_of_the_operators_own_is_told_in_status(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(model())
    await bench.rest()
    before = bench.state()

    def fail(*_: Any) -> Any:
        raise TypeError("unforeseen")

    bench.put(model(1, 3))
    with monkeypatch.context() as patched:
        patched.setattr(reconcile, "take_turn", fail)
        await bench.rest()
        assert bench.condition("Stalled") == ("True", "InvalidSpec")
        assert "(TypeError); see the operator's log and report it" in bench.message("Stalled")
        assert bench.live()["observedGeneration"] == 2
        assert bench.state()["replicas"] == before["replicas"]
    await bench.rest()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}


async def test_an_operator_that_is_older_than_the_crd_goes_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """In an upgrade the CRD comes first, and fills in the defaults of its new fields."""
    bench.put(model())
    await bench.rest()
    scaling = {"ratio": {"min": "1:9", "max": "9:1", "step": 2}, "foresight": "Enabled"}
    bench.put(model(1, 3, scaling=scaling, later={"a": [1]}))
    await bench.rest()
    assert bench.condition("Stalled") == ("False", "NotStalled")
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}
    told = [record.message for record in caplog.records if "later version's CRD" in record.message]
    assert len(told) == 1, "once, not with every look"
    for field in ("spec.later", "spec.scaling.foresight", "spec.scaling.ratio.step"):
        assert field in told[0]
    bench.put(model(1, 2, later=1, router={"podTemplate": {"spec": {"priority": 1.5}}}))
    await bench.rest()
    assert bench.condition("Stalled") == ("True", "InvalidSpec"), "what is wrong stays wrong"
    assert "priority" in bench.message("Stalled")


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (403, 'deployments.apps "x" is forbidden: exceeded quota: team', "QuotaExceeded"),
        (422, "spec.template.spec.containers[0].name: Required value", "Rejected"),
        (400, 'admission webhook "policy" denied the request: no', "Rejected"),
    ],
)
async def test_a_refused_child_is_a_condition_and_is_cured(
    bench: Bench, status: int, message: str, reason: str
) -> None:
    def before(call: Call) -> None:
        if call.verb == "patch" and call.plural == "deployments" and "decode" in call.name:
            raise Refused(status, "Refused", message)

    bench.put(model())
    bench.api.before = before
    await bench.rest()
    assert reason in {c["reason"] for c in bench.live()["conditions"]}
    bench.api.before = None
    await bench.rest()
    assert bench.condition("Ready")[0] == "True"


async def test_optional_children_go_when_they_are_asked_for_no_more(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    bench.put(model(networkPolicy="Disabled"))
    await bench.rest()
    assert "networkpolicies" not in kinds(bench.api)


@pytest.mark.parametrize(("status", "seconds"), [(429, 7.0), (409, 0.0), (410, 0.0), (500, 0.0)])
async def test_what_the_server_refuses_is_tried_again(bench: Bench, status: int, seconds: float) -> None:
    headers = {"Retry-After": "7"} if status == 429 else {}

    def before(call: Call) -> None:
        if call.write:
            raise Refused(status, "Refused", headers=headers)

    bench.put(model())
    bench.api.before = before
    with pytest.raises(RetryAfter) as error:
        await bench.once()
    assert error.value.seconds == seconds


async def test_the_token_is_made_once_and_kept(bench: Bench) -> None:
    bench.put(model())
    await bench.rest()
    secret = copy.deepcopy(bench.api.find("secrets", "assistant-token"))
    bench.restart()
    await bench.rest()
    assert bench.api.find("secrets", "assistant-token") == secret


SHARED = {"scaling": {"maxGPUs": 4}}
SCENARIOS: dict[str, tuple[Object | None, Object | None]] = {
    "create": (None, model(1, 2)),
    "scale-in": (model(2, 3), model(1, 1)),
    "rollout": (model(1, 2), model(1, 2, engine={"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}})),
    "move": (native_model(3, 1, **SHARED), native_model(2, 2, **SHARED)),
    "delete": (model(1, 2), None),
}


@pytest.mark.parametrize("lost", [False, True], ids=["killed", "answer lost"])
@pytest.mark.parametrize("name", list(SCENARIOS))
async def test_killed_after_every_single_write(bench: Bench, name: str, lost: bool) -> None:
    """The operator ends after its n-th write, for every n, and another goes on: always the same final state."""

    before, after = SCENARIOS[name]
    if before is not None:
        bench.put(before)
        await bench.rest()
    begun = bench.api.snapshot()

    async def run(kill_after: int | None) -> tuple[dict[str, Any], int]:
        bench.api.restore(begun)
        bench.cluster.deleted.clear()
        bench.restart()
        if after is None:
            bench.api.remove("disaggregatedmodels", "assistant")
        else:
            bench.put(after)
        count = 0

        def written(call: Call) -> None:
            nonlocal count
            if call.write and call.plural != "events":
                count += 1
                if count - 1 == kill_after:
                    raise Refused(500, "InternalError", "killed")

        setattr(bench.api, "after" if lost else "before", written)
        bench.on_failure = bench.restart
        await bench.rest()
        bench.on_failure = None
        bench.api.after = bench.api.before = None
        await bench.rest()
        assert all(
            labels.DRAINING in pod["metadata"]["labels"] for pod, _ in bench.cluster.deleted if name == "scale-in"
        )
        return bench.state(), count

    expected, writes = await run(None)
    for kill_after in range(writes):
        state, _ = await run(kill_after)
        assert state == expected, f"killed after write {kill_after} of {writes}"
