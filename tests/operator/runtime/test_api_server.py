"""The operator against a real API server with real controllers, and with kubelets that say what kubelets say.

Needs etcd, kube-apiserver and kube-controller-manager in the cache folder: `make kube-binaries` builds them once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from forebay_operator import kube as k
from forebay_operator.api import labels
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.decide import Memory
from forebay_operator.kube import Object
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.gather import Nodes
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.types import LatencyView
from forebay_operator.pilot import Checkpoint, Pilot
from forebay_operator.preview.changes import Action
from forebay_operator.preview.forecast import Fate
from forebay_operator.preview.preview import Preview, preview
from forebay_operator.rescaler import write_checkpoint
from forebay_operator.status.fields import filled
from support.fake_cluster import simulated_model
from support.law_world import SPEED, Load, ScriptedTraffic
from support.real_site import Site


async def test_the_life_of_a_model(site: Site) -> None:
    """Apply, roles, rest, scale in under load, roll out, delete: on the real server's own terms."""
    async with site.operator():
        await site.apply(simulated_model(1, 3))
        await site.until("ready", site.is_ready)
        await site.until("roles", lambda: _equals(site.roles, {"prefill": 1, "decode": 3}))
        await site.until("settled", site.is_settled)
        await _at_rest(site)

        decode = [n for n, p in site.kubelets.seen.items() if p["metadata"]["labels"].get(labels.POOL) == "decode"]
        site.workers.running = {decode[0]: 2, decode[1]: 5, decode[2]: 9}
        await site.apply(simulated_model(1, 2))

        async def fenced() -> bool:
            pods = await site.kube.list(k.PODS, site.namespace, selector=labels.DRAINING)
            return [pod["metadata"]["name"] for pod in pods] == [decode[0]]

        await site.until("the idlest fenced", fenced)
        site.workers.running.pop(decode[0])
        await site.until("two decode workers", lambda: _equals(site.roles, {"prefill": 1, "decode": 2}))
        left = {pod["metadata"]["name"] for pod in await site.kube.list(k.PODS, site.namespace, selector=labels.ROLE)}
        assert {decode[1], decode[2]} < left, "exactly the fenced one went"
        site.workers.running.clear()

        changed = simulated_model(1, 2, engine={"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}})
        await site.apply(changed)

        async def rolled() -> bool:
            pods = await site.kube.list(k.PODS, site.namespace, selector=labels.POOL)
            images = [pod["spec"]["containers"][0]["image"] for pod in pods]
            return images == ["e:2"] * 3 and await site.is_settled()

        await site.until("rolled out", rolled, 60.0)

        async def removed() -> bool:
            return len(await site.kube.list(k.DEPLOYMENTS, site.namespace)) == 3

        await site.until("the old revisions' Deployments are removed", removed)

        held = await site.model()
        await site.kube.delete(k.MODELS, site.namespace, "assistant", uid=held["metadata"]["uid"])

        async def gone() -> bool:
            left = [
                (resource.kind, obj["metadata"]["name"])
                for resource in (*k.CHILDREN, k.PODS)
                if resource is not k.POD_MONITORS
                for obj in await site.kube.list(resource, site.namespace, selector=labels.MODEL)
            ]
            return not left

        await site.until("nothing left", gone)


async def test_a_plan_is_what_then_happens(site: Site) -> None:
    """On the real server's own dry runs: nothing planned at rest, and a plan that comes true."""
    workers, surroundings = site.workers, Surroundings("default")

    async def plan(obj: Object) -> Preview:
        written = {**obj, "metadata": {**obj["metadata"], "namespace": site.namespace}}
        nodes = Nodes(site.kube, asyncio.get_running_loop().time)
        return await preview(site.kube, written, workers, nodes, surroundings, datetime.now(UTC))

    first = await plan(simulated_model(1, 3))
    assert first.changes
    assert not first.refused, first.objects
    assert {change.action for change in (first.model, *first.objects)} == {Action.CREATE}
    assert await site.kube.list(k.MODELS, site.namespace) == []
    async with site.operator():
        await site.apply(simulated_model(1, 3))
        await site.until("roles", lambda: _equals(site.roles, {"prefill": 1, "decode": 3}))
        await site.until("settled", site.is_settled)
        await _at_rest(site)
        made = {(obj["kind"], obj["metadata"]["name"]) for resource in k.CHILDREN if resource is not k.POD_MONITORS
                for obj in await site.kube.list(resource, site.namespace, selector=labels.MODEL)}  # fmt: skip
        assert {(change.kind, change.name) for change in first.objects} == made
        again = await plan(simulated_model(1, 3))
        assert not again.changes, [change for change in again.objects if change.action is not Action.KEEP]

        smaller = await plan(simulated_model(1, 2))
        drained = [pod.name for pod in smaller.forecast.pods if pod.fate is Fate.DRAINED]
        await site.apply(simulated_model(1, 2))
        await site.until("two decode workers", lambda: _equals(site.roles, {"prefill": 1, "decode": 2}))
        pods = await site.kube.list(k.PODS, site.namespace, selector=labels.ROLE)
        left = {pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}
        assert left == {pod.name for pod in smaller.forecast.pods if pod.fate is Fate.KEPT}
        assert len(drained) == 1


async def test_a_child_that_kubectl_scales_is_put_back(site: Site) -> None:
    """The real server's managedFields tell who wrote, by the scale subresource too."""
    async with site.operator():
        await site.apply(simulated_model(1, 2))
        await site.until("roles", lambda: _equals(site.roles, {"prefill": 1, "decode": 2}))
        await site.until("settled", site.is_settled)
        deployments = await site.kube.list(k.DEPLOYMENTS, site.namespace, selector=f"{labels.POOL}=decode")
        name = deployments[0]["metadata"]["name"]

        async def scale() -> None:
            await site.kube._request(  # what `kubectl scale` sends
                "patch", "PATCH", k.DEPLOYMENTS, site.namespace, name, subresource="scale",
                query={"fieldManager": "kubectl"}, body={"spec": {"replicas": 4}},
                content_type="application/merge-patch+json",
            )  # fmt: skip

        async def told() -> bool:
            events = await site.kube.list(k.EVENTS, site.namespace)
            notes = [event["note"] for event in events if event["reason"] == "ForeignWriter"]
            if not notes and (await site.kube.get(k.DEPLOYMENTS, site.namespace, name))["spec"]["replicas"] == 2:
                await scale()  # for the first time, or an apply under way has put it back unseen
            return notes == [note for note in notes if f"{name}: spec.replicas was set to 4 by kubectl" in note] != []

        await site.until("told", told)

        async def back() -> bool:
            held = await site.kube.get(k.DEPLOYMENTS, site.namespace, name)
            return held["spec"]["replicas"] == 2 and await site.roles() == {"prefill": 1, "decode": 2}

        await site.until("two again, by drains", back, 60.0)


async def test_an_autoscaler_on_a_child_is_not_fought(site: Site) -> None:
    """As an HPA with minReplicas 5 does it: it looks often, and writes whenever it finds fewer. While our count is the
    same as its own, the real server keeps no time of its write."""
    async with site.operator():
        await site.apply(simulated_model(1, 3))
        await site.until("settled", site.is_settled)
        deployments = await site.kube.list(k.DEPLOYMENTS, site.namespace, selector=f"{labels.POOL}=decode")
        name = deployments[0]["metadata"]["name"]
        writes = 0

        async def autoscaled() -> int:
            nonlocal writes
            live = await site.kube.get(k.DEPLOYMENTS, site.namespace, name)
            if live["spec"]["replicas"] < 5:
                writes += 1
                await site.kube._request(
                    "patch", "PATCH", k.DEPLOYMENTS, site.namespace, name, subresource="scale",
                    query={"fieldManager": "kube-controller-manager"}, body={"spec": {"replicas": 5}},
                    content_type="application/merge-patch+json",
                )  # fmt: skip
            return int(live["spec"]["replicas"])

        async def told() -> bool:
            await autoscaled()
            conditions = {c["type"]: c for c in (await site.model())["status"]["conditions"]}
            told: Object = conditions["ForeignWriter"]
            return told["status"] == "True" and f"Deployment {name}: spec.replicas" in told["message"]

        await site.until("told", told, 60.0)
        # What was under way when it was told of may end.
        await site.until("nothing is under way", site.is_settled, 60.0)
        before = writes

        async def left() -> bool:
            return await autoscaled() == 5 and sum((await site.roles()).values()) == 6

        await site.until("five decode workers serve", left, 60.0)
        assert writes - before <= 1, "it gets its way"


async def _at_rest(site: Site) -> None:
    """Until nothing else is written for two renewals of the Lease."""
    seen, since = -1, 0

    async def quiet() -> bool:
        nonlocal seen, since
        writes = [plural for verb, _, plural, _ in site.requests if verb not in ("get", "list")]
        others = len(writes) - writes.count("leases")
        if others != seen:
            seen, since = others, writes.count("leases")
        return writes.count("leases") >= since + 2

    await site.until("rest", quiet)


async def _equals(value: Callable[[], Any], expected: object) -> bool:
    return bool(await value() == expected)


async def test_the_laws_checkpoint_comes_back_as_it_was_written(site: Site) -> None:
    """Else each reconcile would find a difference and write it again."""
    made = await site.kube.apply(k.MODELS, _bare(site), force=True)
    pilot = Pilot(now=1.0)
    law = write_checkpoint(pilot.checkpoint(Capacity([5000.0]), windows=False))
    said = {"observedGeneration": 1, "memory": {"law": law}}
    status = {**_bare(site), "status": said}
    del status["spec"]
    after = await site.kube.apply(k.MODELS, status, force=True, subresource="status")
    assert after["status"] == said
    again = await site.kube.apply(k.MODELS, status, force=True, subresource="status")
    assert again["metadata"]["resourceVersion"] == after["metadata"]["resourceVersion"]
    assert made["metadata"]["uid"] == after["metadata"]["uid"]


@pytest.mark.parametrize("left", [LatencyView(), None], ids=["no request in the window", "no router answers"])
async def test_figures_of_a_status_go_when_traffic_ends(site: Site, left: LatencyView | None) -> None:
    """The real server makes a null of a map that loses all its fields, and refuses that."""

    async def figures() -> Any:
        return (await site.model())["status"].get("latency")

    site.workers.latency = LatencyView(640, 31, 99)
    async with site.operator():
        await site.apply(simulated_model(1, 1))
        await site.until("settled", site.is_settled)
        await site.until("figures", figures)
        site.workers.latency = left
        await site.apply(simulated_model(1, 1, drain={"timeoutSeconds": 30}))
        await site.until("the newest spec seen", site.is_settled)
        assert await figures() is None


@pytest.mark.parametrize("path", [("memory", "law", "believed"), ("decision", "inputs")], ids="/".join)
async def test_no_empty_map_is_written_to_a_status(site: Site, path: tuple[str, ...]) -> None:
    """What a map held goes, the real server lets it, and what it then has is what was written."""

    def status(value: Object) -> Object:
        for key in reversed(path):
            value = {key: value}
        if "decision" in value:
            value["decision"] |= {"time": "2026-01-01T00:00:00Z", "action": "Hold", "reason": "Steady"}
        return {"observedGeneration": 1, **value}

    await site.kube.apply(k.MODELS, _bare(site), force=True)
    for value in ({"a": 1}, {}):
        written = filled(status(value))
        body = {key: held for key, held in _bare(site).items() if key != "spec"} | {"status": written}
        after = await site.kube.apply(k.MODELS, body, force=True, subresource="status")
        assert after["status"] == written


async def test_the_law_grows_a_pool_and_shrinks_it_again(site: Site) -> None:
    """Real Deployments, real time, and the load that the test says. The law begins with full windows."""
    model = simulated_model(1, 1, scaling={
        "prefill": {"minReplicas": 1, "maxReplicas": 3},
        "decode": {"minReplicas": 1, "maxReplicas": 1},
        "behavior": {"scaleUp": {"stabilizationWindowSeconds": 1}, "scaleDown": {"stabilizationWindowSeconds": 2}},
    })  # fmt: skip
    for pool in labels.POOLS:
        model["spec"][pool] = {}
    made = await site.apply(model)
    now = time.time()
    memory = Memory(target=(1, 1), started_at=now - 61, seen_at=now, arrivals=[(float(int(now)), 1, 100)], output=50.0)
    law = write_checkpoint(Checkpoint(memory.dump(), believed={k: v for k, v in asdict(SPEED).items() if v < math.inf}))
    status = {key: made[key] for key in ("apiVersion", "kind")} | {
        "metadata": {key: made["metadata"][key] for key in ("name", "namespace")},
        "status": {"observedGeneration": 0, "memory": {"law": law}},
    }
    await site.kube.apply(k.MODELS, status, force=True, subresource="status")
    load = Load(prompts=5, tokens=1500)

    async def source(key: Any, spec: Any, base: Totals | None, _: Capacity | None) -> ScriptedTraffic:
        return ScriptedTraffic(lambda: load, time.time, base)

    async with site.operator() as operator:
        operator.rescaler._make_source = source
        await site.until("a worker more", lambda: _equals(site.roles, {"prefill": 2, "decode": 1}), 60.0)
        await site.until("settled", site.is_settled)
        said = (await site.model())["status"]
        told = [said["decision"], *said.get("decisions", [])]
        assert ("Scale", "1:1", "2:1") in [(d["action"], d["from"], d["to"]) for d in told]
        assert (said["prefill"]["target"], said["decode"]["target"]) == (2, 1)
        assert said["memory"]["homes"] == {"prefill": 2, "decode": 1}
        load = Load(prompts=1, tokens=100)
        await site.until("a worker less", lambda: _equals(site.roles, {"prefill": 1, "decode": 1}), 90.0)
        await site.until("settled again", site.is_settled)

        async def over() -> bool:
            return "operation" not in (await site.model())["status"]

        # Its record goes in the pass after the one that saw the worker gone.
        await site.until("no operation under way", over)


def _bare(site: Site) -> Object:
    held = simulated_model(1, 1)
    return {**held, "metadata": {"name": "checkpointed", "namespace": site.namespace}}


async def test_a_model_has_the_status_default_before_the_operator_sees_it(site: Site) -> None:
    await site.apply(simulated_model(1, 1))
    assert (await site.model())["status"]["observedGeneration"] == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": {}}, "prefill has no size"),
        ({"scaling": {"prefill": {"minReplicas": 1, "maxReplicas": 2}}}, "prefill.replicas and scaling.prefill"),
        ({"rollout": {"maxUnavailable": 0, "maxSurge": 0}}, "maxUnavailable and maxSurge are both 0"),
        ({"prefill": {"replicas": 0}}, "greater than or equal to 1"),
        ({"colour": "red"}, "unknown field|field not declared"),
    ],
    ids=["no size", "two sizes", "no way to roll", "zero", "unknown field"],
)
async def test_the_real_servers_verdicts(site: Site, change: Object, message: str) -> None:
    obj = simulated_model(1, 1)
    with pytest.raises(k.ApiError, match=message):
        await site.apply({**obj, "spec": {**obj["spec"], **change}})


async def test_a_pod_template_of_a_megabyte(site: Site) -> None:
    """The real server takes it; the operator says so in few words, what runs goes on, and the cure is seen."""

    async def stalled() -> bool:
        held = (await site.model())["status"]["conditions"]
        message = next(str(c["message"]) for c in held if (c["type"], c["status"]) == ("Stalled", "True"))
        assert "spec.decode.podTemplate: is 1000" in message
        assert "at most 32768; correct the spec" in message
        return len(message) < 400

    async def told() -> bool:
        held = await site.model()
        seen = held["status"].get("observedGeneration") == held["metadata"]["generation"]
        return seen and any(
            (c["type"], c["reason"]) == ("Stalled", "InvalidSpec") for c in held["status"]["conditions"]
        )

    async with site.operator():
        await site.apply(simulated_model(1, 2))
        await site.until("settled", site.is_settled)
        pods = {pod["metadata"]["uid"] for pod in await site.kube.list(k.PODS, site.namespace, selector=labels.POOL)}
        large = simulated_model(1, 1)
        large["spec"]["decode"]["podTemplate"] = {"metadata": {"annotations": {"a": "x" * 1_000_000}}}
        await site.apply(large)
        await site.until("told", told)
        assert await stalled()
        assert await site.is_ready()
        left = {pod["metadata"]["uid"] for pod in await site.kube.list(k.PODS, site.namespace, selector=labels.POOL)}
        assert left == pods
        await site.apply(simulated_model(1, 2))
        await site.until("settled again", site.is_settled)


async def test_server_side_apply_for_real(site: Site) -> None:
    """What the fake server only imitates: conflicts, ownership, a second apply that changes nothing."""
    from forebay_operator.act.apply import Applier, ApplyCache, Owner, Result

    held = await site.apply(simulated_model(1, 1))
    owner = Owner("assistant", site.namespace, held["metadata"]["uid"])
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "labels": {"a": "b"}},
        "spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}], "selector": {"x": "y"}},
    }
    applier = Applier(site.kube, ApplyCache())
    assert (await applier.apply(service, owner)).result is Result.CREATED
    assert (await Applier(site.kube, ApplyCache()).apply(service, owner)).result is Result.UNCHANGED
    live = await site.kube.get(k.SERVICES, site.namespace, "s")
    assert not applier.cache.seen(live), "the server's own defaults are no change"
    await site.kube._request(  # what another client would send
        "patch", "PATCH", k.SERVICES, site.namespace, "s", query={"fieldManager": "kubectl-edit"},
        body={"spec": {"selector": {"x": "z"}}}, content_type="application/merge-patch+json",
    )  # fmt: skip
    assert applier.cache.seen(await site.kube.get(k.SERVICES, site.namespace, "s"))
    again = await applier.apply(service, owner)
    assert again.result is Result.CHANGED
    assert again.taken_from == ("kubectl-edit: spec.selector",)
    with pytest.raises(k.Conflict):
        await applier.apply({**service, "spec": {**service["spec"], "selector": {"x": "w"}}}, owner, locked="1")
    assert await applier.remove(await site.kube.get(k.SERVICES, site.namespace, "s"), owner)
