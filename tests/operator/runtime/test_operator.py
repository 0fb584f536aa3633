"""A whole operator in this process, kopf included, against the fake API server; and its parts that kopf drives."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import aiohttp
import pytest

from forebay_operator import handlers, watching
from forebay_operator.act.apply import ApplyCache
from forebay_operator.api import labels
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.health import HealthServer
from forebay_operator.kube import ApiError, KubeClient
from forebay_operator.main import LeaseLost, parse_args
from forebay_operator.metrics import OperatorMetrics
from forebay_operator.observe.discovery import has_pod_monitors
from forebay_operator.observe.gather import Nodes
from forebay_operator.watching import WatchHealth
from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import Call, FakeApi, Object, Refused, eventually
from support.operator_bench import operator

KEY = ("llm", "assistant")


@pytest.fixture
def cluster(api: FakeApi) -> FakeCluster:
    made = FakeCluster(api)
    api.on_write = made.control
    api.missing.add("podmonitors")
    return made


def ready(api: FakeApi, name: str = "assistant") -> bool:
    held = api.find("disaggregatedmodels", name)
    conditions = (held or {}).get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


async def rested(api: FakeApi) -> None:
    """Nothing but the Lease is written for twenty of its renewals, which come ten times a second here."""

    def tail() -> list[str]:
        return [call.plural for call in api.writes()[-20:]]

    await eventually(lambda: len(tail()) == 20 and set(tail()) == {"leases"}, "rest")


async def test_from_apply_to_delete(api: FakeApi, cluster: FakeCluster) -> None:
    async with operator(api, cluster) as running:
        await asyncio.wait_for(running.operator.watched.wait(), 10)
        api.put(simulated_model(1, 2))
        await eventually(lambda: ready(api), "the model ready")
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 2}, "roles")

        loop = asyncio.get_running_loop()
        held = copy.deepcopy(api.find("disaggregatedmodels", "assistant"))
        assert held is not None
        cluster.kill(cluster.workers("prefill")[0]["metadata"]["name"])
        cluster.control()
        started = loop.time()
        await eventually(lambda: cluster.roles()["prefill"] == 1, "the new worker's role")
        assert loop.time() - started < 5.0, "5 times the second that a role switch may take"

        service = copy.deepcopy(api.find("services", "assistant-router"))
        assert service is not None
        service["spec"]["selector"] = {"app": "other"}
        api.put(service)
        await eventually(
            lambda: (api.find("services", "assistant-router") or {})["spec"]["selector"] != {"app": "other"},
            "the Service put back",
        )

        finalizers = [o["metadata"].get("finalizers") for o in api.objects.values()]
        assert not any(finalizers), "kopf writes nothing"
        kinds = {call.plural for call in api.calls if call.verb in ("list", "watch")}
        assert "secrets" not in kinds
        assert "customresourcedefinitions" not in kinds
        for call in api.calls:
            if call.verb == "watch" and call.plural in ("pods", "deployments", "services"):
                assert call.query.get("labelSelector") == labels.MODEL, "only our children are watched"

        await rested(api)
        assert running.operator.queue.due.next_due() is not None, "the next resync"
        api.remove("disaggregatedmodels", "assistant")
        await eventually(lambda: running.operator.queue.due.next_due() is None, "nothing left to do")
        assert running.operator.alive() is None


async def test_it_comes_to_rest_and_survives_dying_watches(api: FakeApi, cluster: FakeCluster) -> None:
    async with operator(api, cluster):
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api) and cluster.roles() == {"prefill": 1, "decode": 1}, "the model ready")
        await rested(api)
        api.close_watches()
        api.put({**(api.find("disaggregatedmodels", "assistant") or {}), "spec": simulated_model(1, 2)["spec"]})
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 2}, "the change seen after a relist")


async def test_a_child_that_went_while_no_watch_told_is_made_again(api: FakeApi, cluster: FakeCluster) -> None:
    """As when a watch has to begin anew, for 410 Gone: it lists what is there."""
    async with operator(api, cluster, resync=0.3):
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api) and cluster.roles() == {"prefill": 1, "decode": 1}, "the model ready")
        lost = [("services", "assistant-router"), ("poddisruptionbudgets", "assistant-decode")]
        for plural, name in lost:
            del api.objects[plural, "llm", name]
        for plural, name in lost:
            await eventually(lambda p=plural, n=name: api.find(p, n) is not None, f"{name} made again")  # type: ignore[misc]
        await rested(api)


async def test_a_crd_that_comes_after_the_operator(
    api: FakeApi, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """kopf looks for kinds once."""
    api.missing.add("disaggregatedmodels")
    async with operator(api, cluster) as running:
        await eventually(lambda: "waiting for their CRD" in caplog.text, "a word of it")
        assert running.operator.alive() is None
        api.missing.discard("disaggregatedmodels")
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api), "the model ready")


@pytest.mark.parametrize("namespaces", [("gone", "llm"), ("llm", "gone")], ids=["the first", "the last"])
@pytest.mark.parametrize("when", ["before the operator", "later"])
async def test_a_namespace_that_is_gone_holds_no_other_up(
    api: FakeApi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, namespaces: tuple[str, ...], when: str
) -> None:
    """The operator's rights in it went too."""
    monkeypatch.setattr(handlers, "WATCH_RETRY_SECONDS", (0.01,))
    api.missing.discard("podmonitors")
    gone, refused = when == "before the operator", 0

    def before(call: Call) -> None:
        nonlocal refused
        if gone and call.namespace == "gone":
            refused += 1
            raise Refused(403, "Forbidden")

    api.before = before
    async with operator(api, cluster, namespaces=namespaces, pod_monitors=True, kinds_every=0.1, resync=0.3) as running:
        await asyncio.wait_for(running.operator.watched.wait(), 10)
        gone, refused = True, 0
        api.close_watches()
        await eventually(lambda: refused > 300, "kopf refused far more often than it tries by itself, for each kind")
        api.put(simulated_model(1, 2))
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 2}, "the other namespace served")
        assert api.all("podmonitors")
        del api.objects["services", "llm", "assistant-router"]
        await eventually(lambda: api.find("services", "assistant-router") is not None, "listed too")
        assert not running.task.done()
        assert running.operator.alive() is None


@pytest.mark.parametrize("plural", ["disaggregatedmodels", "pods"])
@pytest.mark.parametrize("status", [403, 500, 503])
async def test_a_watch_that_is_refused_for_long_goes_on_afterwards(
    api: FakeApi, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, plural: str, status: int
) -> None:
    """kopf alone tries nine times, and then ends."""
    monkeypatch.setattr(handlers, "WATCH_RETRY_SECONDS", (0.01,))
    async with operator(api, cluster) as running:
        await asyncio.wait_for(running.operator.watched.wait(), 10)
        api.put(simulated_model(1, 1))
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 1}, "roles")
        left = 50

        def before(call: Call) -> None:
            nonlocal left
            if left and call.plural == plural and call.verb == "watch":
                left -= 1
                raise Refused(status, "Refused")

        api.before = before
        api.close_watches()
        await eventually(lambda: left == 0, "fifty refusals")
        api.put({**(api.find("disaggregatedmodels", "assistant") or {}), "spec": simulated_model(1, 2)["spec"]})
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 2}, "the change seen")
        assert not running.task.done()


def test_how_long_a_refused_watch_waits() -> None:
    backoffs = handlers.settings().networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    for _ in range(2):  # each request counts anew
        first = list(islice(backoffs, 1000))
        assert (first[0], max(first), first[-1]) == (1.0, 30.0, 30.0)


async def test_a_model_that_goes_untold_is_no_stale_watch(api: FakeApi, cluster: FakeCluster) -> None:
    """A watch that begins anew lists what there is: the last write to a model that went meanwhile never comes back."""
    async with operator(api, cluster) as running:
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api), "the model ready")
        await rested(api)
        running.operator.watches.wrote(KEY, "999999999", asyncio.get_running_loop().time() - 1000)
        assert running.operator.alive() is not None
        del api.objects["disaggregatedmodels", "llm", "assistant"]
        api.remove("services", "assistant-router")
        await eventually(lambda: running.operator.alive() is None, "asked for, and not there")


async def test_a_standby_takes_over_and_the_loser_ends(api: FakeApi, cluster: FakeCluster) -> None:
    # Both begin before either leads: kopf, when it ends, cancels every younger task of its loop. In life each has a
    # process of its own.
    async with operator(api, cluster, "one") as one, operator(api, cluster, "two") as two:
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api), "the model ready")
        leader = str((api.find("leases", "forebay-operator", "forebay") or {})["spec"]["holderIdentity"])
        first, second = (one, two) if leader == "one" else (two, one)
        assert not second.operator.watched.is_set(), "a standby watches nothing"

        def before(call: Call) -> None:
            if call.plural == "leases" and call.write and call.body["spec"]["holderIdentity"] == leader:
                raise Refused(500, "InternalError")

        api.before = before
        with pytest.raises(ExceptionGroup) as error:
            await asyncio.wait_for(first.task, 10)
        assert [type(one) for one in error.value.exceptions] == [LeaseLost]
        await asyncio.wait_for(second.operator.watched.wait(), 10)
        api.put({**(api.find("disaggregatedmodels", "assistant") or {}), "spec": simulated_model(1, 2)["spec"]})
        await eventually(lambda: cluster.roles() == {"prefill": 1, "decode": 2}, "the other's work")


async def test_what_the_liveness_probe_sees(api: FakeApi, cluster: FakeCluster) -> None:
    async with operator(api, cluster, port=0) as running:
        health = HealthServer("127.0.0.1", 0, OperatorMetrics(), running.operator.alive)
        await health.start()
        async with aiohttp.ClientSession() as session:
            for path, expected in (("/healthz", 200), ("/readyz", 200), ("/metrics", 200)):
                async with session.get(f"http://127.0.0.1:{health.port}{path}") as response:
                    assert response.status == expected
            running.operator.watches.wrote(KEY, "999999999", asyncio.get_running_loop().time() - 1000)
            async with session.get(f"http://127.0.0.1:{health.port}/healthz") as response:
                assert response.status == 500
                assert "has not come back through its watch" in await response.text()
            async with session.get(f"http://127.0.0.1:{health.port}/readyz") as response:
                assert response.status == 200, "readiness is another question"
        await health.close()


def test_watch_health() -> None:
    health = WatchHealth(60.0)
    assert health.stale(1e9) is None
    health.wrote("a", "10", 0.0)
    health.wrote("a", "11", 50.0)
    assert health.stale(60.0) is None
    assert health.stale(60.1) is not None, "the first write counts"
    health.seen("a", "11")
    assert health.stale(1e9) is None


@pytest.mark.parametrize(
    ("reported", "written", "expected"),
    [
        ("9", "10", True),
        ("10", "10", False),
        ("11", "10", False),
        ("", "10", True),
        ("b", "b", False),
        ("b", "a", True),
    ],
)
def test_a_watch_that_is_faster_than_the_answer_to_the_write(reported: str, written: str, expected: bool) -> None:
    """Else an operator whose last write was so reported would be taken for one with dead watches, and restarted."""
    health = WatchHealth(60.0)
    health.seen("a", reported)
    health.wrote("a", written, 0.0)
    assert (health.stale(100.0) is not None) == expected


def test_what_watches_reported_is_not_kept_for_ever() -> None:
    health = WatchHealth(60.0)
    for index in range(watching.REMEMBERED + 5):
        health.seen(index, "1")
    health.wrote(0, "1", 0.0)
    health.wrote(watching.REMEMBERED, "1", 0.0)
    assert "a write of 0 " in (health.stale(100.0) or "")
    assert "; 1 such" in (health.stale(100.0) or "")


class Asked:
    def __init__(self) -> None:
        self.keys: list[tuple[str, str]] = []
        self.delays: list[float] = []

    def add(self, key: tuple[str, str], delay: float = 0.0) -> None:
        self.keys.append(key)
        self.delays.append(delay)

    def forget(self, key: tuple[str, str]) -> None: ...


def child(kind: str, **values: Any) -> Object:
    meta = {"name": "x", "namespace": "llm", "labels": {labels.MODEL: "assistant"}}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, **values}


def test_which_events_are_a_reason_to_look() -> None:
    asked, cache = Asked(), ApplyCache()
    watches = handlers.Watches(asked, cache, WatchHealth(60.0), lambda: 0.0)
    cache.store(("v1", "Service", "llm", "x"), "intent", child("Service", spec={"a": 1}))
    watches.child("MODIFIED", child("Service", spec={"a": 1}, status={"b": 2}), active=False)
    assert asked.keys == [], "our own write coming back"
    watches.child("MODIFIED", child("Service", spec={"a": 2}), active=False)
    assert asked.keys == [KEY]
    watches.child("DELETED", child("Service"), active=False)
    watches.child("MODIFIED", child("Pod"), active=True)
    assert asked.keys == [KEY] * 3
    stranger = child("Pod")
    del stranger["metadata"]["labels"]
    watches.child("MODIFIED", stranger, active=True)
    assert asked.keys == [KEY] * 3


def test_a_nodes_heartbeat_is_no_news() -> None:
    asked = Asked()
    watches = handlers.Watches(asked, ApplyCache(), WatchHealth(60.0), lambda: 0.0)
    watches.model("ADDED", simulated_model())
    node: Object = {"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": []}}
    watches.node(None, node)
    asked.keys.clear()
    watches.node("MODIFIED", {**node, "status": {**node["status"], "images": ["x"]}})
    assert asked.keys == []
    watches.node("MODIFIED", {**node, "spec": {"unschedulable": True}})
    watches.node("DELETED", node)
    assert asked.keys == [KEY, KEY]


@pytest.mark.parametrize(
    ("change", "delay"),
    [
        ({"spec": {"unschedulable": True}}, handlers.NODE_DELAY_SECONDS),
        ({"status": {"allocatable": {}, "conditions": [{"type": "Ready", "status": "False"}]}}, 2.0),
        ({"status": {"allocatable": {"nvidia.com/gpu": "5"}}}, handlers.NODE_FACTS_DELAY_SECONDS),
        ({"metadata": {"name": "n1", "labels": {"a": "b"}}}, handlers.NODE_FACTS_DELAY_SECONDS),
    ],
    ids=["cordoned", "lost", "resources", "labels"],
)
def test_how_soon_models_are_looked_at_after_a_node_has_changed(change: Object, delay: float) -> None:
    """In a large cluster some node changes all the time: not each may bring every model at once."""
    asked = Asked()
    watches = handlers.Watches(asked, ApplyCache(), WatchHealth(60.0), lambda: 0.0)
    watches.model("ADDED", simulated_model())
    node: Object = {"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    watches.node(None, node)
    asked.delays.clear()
    watches.node("MODIFIED", {**node, **change})
    assert asked.delays == [delay]


async def test_nodes_are_listed_once_a_second_however_many_change(api: FakeApi, kube: KubeClient) -> None:
    now = 100.0
    nodes = Nodes(kube, lambda: now)
    for step in range(40):
        now = 100.0 + step / 10
        nodes.changed()
        await nodes.views()
    assert sum(call.plural == "nodes" for call in api.calls) == 4
    now += 2.0
    api.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
    nodes.changed()

    def before(call: Call) -> None:
        api.before = None
        raise Refused(500, "InternalError")

    api.before = before
    with pytest.raises(ApiError):
        await nodes.views()
    assert [view.name for view in await nodes.views() or ()] == ["n1"], "a change is never older than its models' look"


async def test_pod_monitors_are_used_where_there_are_any(api: FakeApi, kube: KubeClient) -> None:
    assert await has_pod_monitors(kube, ())
    api.missing.add("podmonitors")
    assert not await has_pod_monitors(kube, ("llm",))


async def test_pod_monitors_of_one_namespace_will_do(api: FakeApi, kube: KubeClient) -> None:
    def before(call: Call) -> None:
        if call.namespace == "gone":
            raise Refused(403, "Forbidden")

    api.before = before
    assert await has_pod_monitors(kube, ("gone", "llm"))
    assert not await has_pod_monitors(kube, ("gone",))


@pytest.mark.parametrize("there", [True, False])
async def test_it_begins_anew_when_the_cluster_has_other_kinds(api: FakeApi, cluster: FakeCluster, there: bool) -> None:
    """Prometheus' operator comes, or goes: it ends, its Lease free, and the next one knows."""

    def change(now: bool) -> None:
        (api.missing.discard if now else api.missing.add)("podmonitors")

    def monitors() -> int:
        return len(api.all("podmonitors"))

    change(not there)
    async with operator(api, cluster, pod_monitors=not there, kinds_every=0.1) as first:
        api.put(simulated_model(1, 1))
        await eventually(lambda: ready(api), "the model ready")
        assert bool(monitors()) != there
        # Nothing has changed so far, and it goes on.
        assert not first.task.done()
        change(there)
        assert await asyncio.wait_for(first.task, 10), "it asks for another beginning"
    lease = api.find("leases", "forebay-operator", "forebay")
    assert not (lease or {})["spec"].get("holderIdentity")
    if not there:
        for monitor in api.all("podmonitors"):
            api.remove("podmonitors", monitor["metadata"]["name"], "llm")
    async with operator(api, cluster, "two", pod_monitors=there, kinds_every=0.1) as second:
        await eventually(lambda: bool(monitors()) == there, "PodMonitors where there can be any")
        assert not second.task.done()


def test_the_command_line() -> None:
    made = parse_args(["--namespace", "a", "--namespace", "b", "--operator-namespace", "ops", "--engine-image", "e:1"])
    assert made.namespaces == ("a", "b")
    assert made.surroundings == Surroundings("ops", engine_image="e:1")
    assert parse_args([]).identity != parse_args([]).identity, "two processes of one pod name differ"
    for bad in (["--workers", "0"], ["--port", "70000"], ["--colour"]):
        with pytest.raises(SystemExit):
            parse_args(bad)
