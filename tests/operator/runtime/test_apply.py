"""Server-side apply of children: ownership, the cache, foreign objects and foreign changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from forebay_operator import kube as k
from forebay_operator.act.apply import Applier, ApplyCache, ForeignObject, Owner, Result, fingerprint, foreign_changes
from forebay_operator.kube import KubeClient
from support.fake_kube import Call, FakeApi, Object, Refused

OWNER = Owner("assistant", "llm", "uid-model")


def deployment(replicas: int = 2, **template: Any) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "assistant-decode-1", "labels": {"a": "b"}},
        "spec": {"replicas": replicas, "template": {"metadata": {"labels": {"x": "y"}}, "spec": template}},
    }


async def test_made_once_then_from_the_cache(api: FakeApi, kube: KubeClient) -> None:
    applier = Applier(kube, ApplyCache())
    assert (await applier.apply(deployment(), OWNER)).result is Result.CREATED
    made = api.find("deployments", "assistant-decode-1")
    assert made is not None
    assert made["metadata"]["ownerReferences"] == [OWNER.reference()]
    calls = len(api.calls)
    for _ in range(3):
        assert (await applier.apply(deployment(), OWNER)).result is Result.CACHED
    assert len(api.calls) == calls
    assert (await applier.apply(deployment(3), OWNER)).result is Result.CHANGED
    assert (await Applier(kube, ApplyCache()).apply(deployment(3), OWNER)).result is Result.UNCHANGED


async def test_a_field_no_longer_meant_is_removed(api: FakeApi, kube: KubeClient) -> None:
    applier = Applier(kube, ApplyCache())
    await applier.apply(deployment(nodeSelector={"gpu": "h100"}, priorityClassName="high"), OWNER)
    await applier.apply(deployment(priorityClassName="high"), OWNER)
    made = api.find("deployments", "assistant-decode-1")
    assert made is not None
    assert made["spec"]["template"]["spec"] == {"priorityClassName": "high"}


@pytest.mark.parametrize(
    ("change", "drops"),
    [
        (lambda o: o["spec"].update(replicas=9), True),
        (lambda o: o["metadata"]["labels"].update(a="c"), True),
        (lambda o: o["metadata"].update(ownerReferences=[]), True),
        (lambda o: o["metadata"].update(deletionTimestamp="now"), True),
        (lambda o: o.update(status={"replicas": 1}), False),
        (lambda o: o["metadata"].update(resourceVersion="77", generation=9, managedFields=[{}]), False),
        (lambda o: o["metadata"].update(annotations={"deployment.kubernetes.io/revision": "3"}), False),
        (lambda o: o["metadata"].update(annotations={"mine": "3"}), True),
    ],
)
async def test_what_drops_a_cache_entry(api: FakeApi, kube: KubeClient, change: Any, drops: bool) -> None:
    applier = Applier(kube, ApplyCache())
    live = (await applier.apply(deployment(), OWNER)).live
    assert live is not None
    seen = copy.deepcopy(live)
    change(seen)
    assert (fingerprint(seen) != fingerprint(live)) is drops
    assert applier.cache.seen(seen) is drops
    assert (await applier.apply(deployment(), OWNER)).result is (Result.UNCHANGED if drops else Result.CACHED)


@pytest.mark.parametrize("references", [[], [{"kind": "Rollout", "name": "r", "uid": "9", "controller": True}],
                                        [{**OWNER.reference(), "controller": False}]])  # fmt: skip
async def test_a_foreign_object_is_left_alone(api: FakeApi, kube: KubeClient, references: list[Object]) -> None:
    theirs = deployment(7)
    theirs["metadata"].update(namespace="llm", ownerReferences=references)
    before = copy.deepcopy(api.put(theirs))
    with pytest.raises(ForeignObject, match=r"Deployment llm/assistant-decode-1 .*rename the model"):
        await Applier(kube, ApplyCache()).apply(deployment(), OWNER)
    assert api.find("deployments", "assistant-decode-1") == before
    assert not await Applier(kube, ApplyCache()).remove(before, OWNER)


async def test_a_deleted_models_child_is_waited_for(api: FakeApi, kube: KubeClient) -> None:
    old = deployment()
    old["metadata"].update(namespace="llm", ownerReferences=[{**OWNER.reference(), "uid": "uid-before"}])
    api.put(old)
    applier = Applier(kube, ApplyCache())
    with pytest.raises(k.Conflict, match="deleted model of the same name"):
        await applier.apply(deployment(), OWNER)
    api.remove("deployments", "assistant-decode-1")
    assert (await applier.apply(deployment(), OWNER)).result is Result.CREATED


async def test_an_object_made_in_between_is_not_overwritten(api: FakeApi, kube: KubeClient) -> None:
    theirs = deployment(7)
    theirs["metadata"]["namespace"] = "llm"

    def after(call: Call) -> None:
        if call.verb == "get":
            api.after = None
            api.put(theirs)
            api.own("deployments", "assistant-decode-1", "kubectl", ("spec", "replicas"))
            raise Refused(404, "NotFound")

    api.before = after
    with pytest.raises(k.Conflict, match=r"conflict: .spec.replicas"):
        await Applier(kube, ApplyCache()).apply(deployment(), OWNER)


async def test_a_lost_answer_is_made_good(api: FakeApi, kube: KubeClient) -> None:
    def after(call: Call) -> None:
        if call.write:
            api.after = None
            raise Refused(500, "InternalError", "lost")

    api.after = after
    applier = Applier(kube, ApplyCache())
    with pytest.raises(k.Unavailable):
        await applier.apply(deployment(), OWNER)
    assert (await applier.apply(deployment(), OWNER)).result is Result.UNCHANGED


async def test_a_locked_change_minds_the_version(api: FakeApi, kube: KubeClient) -> None:
    applier = Applier(kube, ApplyCache())
    live = (await applier.apply(deployment(), OWNER)).live
    assert live is not None
    version = live["metadata"]["resourceVersion"]
    api.put({**live, "status": {"replicas": 2}})
    with pytest.raises(k.Conflict):
        await applier.apply(deployment(1), OWNER, locked=version)


def test_foreign_changes_are_named() -> None:
    fields = {"f:spec": {"f:replicas": {}, "f:template": {"f:spec": {"f:containers": {'k:{"name":"a"}': {}}}}}}
    live = deployment(5)
    live["metadata"]["managedFields"] = [
        {"manager": "kubectl", "fieldsV1": fields},
        {"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": fields},
        {"manager": "forebay-operator", "fieldsV1": fields},
    ]
    assert foreign_changes(deployment(2), live) == ("kubectl: spec.replicas",)
    assert foreign_changes(deployment(5), live) == ()


@pytest.mark.parametrize(
    ("owned", "expected"),
    [
        ({'k:{"name":"engine"}': {".": {}, "f:image": {}}}, ("spec.template.spec.containers[engine].image",)),
        ({'k:{"name":"engine"}': {"f:env": {'k:{"name":"THEIRS"}': {".": {}, "f:name": {}, "f:value": {}}}}}, ()),
        ({'k:{"name":"sidecar"}': {".": {}, "f:image": {}}}, ()),
        ({'k:{"name":"engine"}': {"f:imagePullPolicy": {}}}, ()),
        (
            {'k:{"name":"engine"}': {"f:ports": {'k:{"containerPort":80,"protocol":"TCP"}': {"f:name": {}}}}},
            ("spec.template.spec.containers[engine].ports[80,TCP].name",),
        ),
    ],
    ids=["a field of ours", "a variable of theirs", "a container of theirs", "a field we leave open", "two keys"],
)
def test_lists_of_several_managers_are_looked_into(owned: Object, expected: tuple[str, ...]) -> None:
    """Else whoever adds a variable to a container is told, with each of our applies, that it was put back."""
    port = {"containerPort": 80, "protocol": "TCP"}
    env = [{"name": "OURS", "value": "1"}]
    ours = {"name": "engine", "image": "e:1", "env": env, "ports": [{**port, "name": "http"}]}
    theirs = {
        **ours,
        "image": "e:2",
        "imagePullPolicy": "Always",
        "env": [*env, {"name": "THEIRS", "value": "2"}],
        "ports": [{**port, "name": "web"}],
    }
    live = deployment(2, containers=[theirs, {"name": "sidecar", "image": "s:1"}])
    fields = {"f:spec": {"f:template": {"f:spec": {"f:containers": owned}}}}
    live["metadata"]["managedFields"] = [{"manager": "kubectl-set", "fieldsV1": fields}]
    assert foreign_changes(deployment(2, containers=[ours]), live) == tuple(f"kubectl-set: {path}" for path in expected)
