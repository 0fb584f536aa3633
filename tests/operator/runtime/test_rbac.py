"""The rights of the operator (the chart) and of routers (their Roles) are the verbs they use: no more, no less."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml

from forebay_operator.build.rbac import router_role
from forebay_router.discovery import View
from forebay_router.pods import ApiServer, PodDiscovery
from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import Call, FakeApi, Object, Refused, eventually
from support.manifests import make_model
from support.operator_bench import operator

INSTALL = Path(__file__).parents[3] / "charts" / "install.yaml"

Right = tuple[str, str, str]
"""Group, resource, verb."""

NOT_SEEN: dict[Right, str] = {
    ("serving.forebay.dev", "disaggregatedmodels/finalizers", "update"): "asked for by an admission plugin only",
}


def granted() -> set[Right]:
    rights: set[Right] = set()
    for document in yaml.safe_load_all(INSTALL.read_text()):
        if not document or document["kind"] not in ("ClusterRole", "Role"):
            continue
        if document["metadata"]["name"].endswith(("-edit", "-view")):
            continue
        for rule in document["rules"]:
            rights |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return rights


def used(api: FakeApi) -> set[Right]:
    groups = {plural: resource.group for plural, resource in api._resources.items()}
    rights: set[Right] = set()
    known: set[tuple[str, str, str]] = set()
    for call in api.calls:
        resource = f"{call.plural}/{call.subresource}" if call.subresource else call.plural
        rights.add((groups[call.plural], resource, call.verb))
        where = (call.plural, call.namespace, call.name)
        if call.verb == "patch" and not call.subresource and call.query.get("force") == "false" and where not in known:
            # An apply that makes the object takes the right to create it too.
            rights.add((groups[call.plural], resource, "create"))
            known.add(where)
    return rights


async def test_rights_are_the_verbs_used(api: FakeApi) -> None:
    cluster = FakeCluster(api)
    api.on_write = cluster.control
    node: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node1"}, "status": {}}
    api.put(node)

    def roles(prefill: int, decode: int) -> bool:
        return cluster.roles() == {"prefill": prefill, "decode": decode}

    async with operator(api, cluster, pod_monitors=True) as running:
        await eventually(running.operator.watched.is_set, "the watches")
        spec = {"networkPolicy": "Enabled", "router": {"replicas": 2}}
        api.put(simulated_model(1, 2, **spec))
        await eventually(lambda: roles(1, 2), "the model served")
        held = api.find("disaggregatedmodels", "assistant")
        assert held is not None
        changed = {"type": "Simulated", "image": "e:2", "kvCache": {"memory": "1Gi"}}
        api.put(
            {
                **held,
                "spec": simulated_model(1, 1, engine=changed, networkPolicy="Disabled", router={"replicas": 1})["spec"],
            }
        )
        await eventually(lambda: roles(1, 1) and len(api.all("deployments")) == 3, "scaled in and rolled out")
        stray: Object = {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PodMonitor",
            "metadata": {
                "name": "left-over",
                "namespace": "llm",
                "labels": {"forebay.dev/model": "assistant"},
                "ownerReferences": (api.find("services", "assistant-router") or {})["metadata"]["ownerReferences"],
            },
        }
        api.put(stray)
        api.put(
            {
                **(api.find("disaggregatedmodels", "assistant") or {}),
                "spec": simulated_model(1, 1, engine=changed)["spec"],
            }
        )
        await eventually(lambda: api.find("podmonitors", "left-over") is None, "the left-over gone")
    assert used(api) - granted() == set(), "used, but not granted"
    assert granted() - used(api) - set(NOT_SEEN) == set(), "granted, but not used"
    assert set(NOT_SEEN) <= granted(), "an exception that is none any more"


async def test_routers_rights_are_the_verbs_used(api: FakeApi, tmp_path: Path) -> None:
    """Through a relist: the router finds its workers, loses its watch, and finds them again."""
    (tmp_path / "token").write_text("secret")
    views: list[View] = []
    discovery = PodDiscovery(ApiServer(api.url, tmp_path), "llm", "assistant", 20.0, backoff=(0.01, 0.05))
    following = asyncio.create_task(discovery.run(views.append))

    def watches() -> int:
        return sum(call.verb == "watch" for call in api.calls)

    try:
        await eventually(lambda: watches() > 0, "the first watch")
        seen, gone = watches(), [Refused(410, "Expired")]

        def before(call: Call) -> None:
            if call.verb == "watch" and gone:
                raise gone.pop()

        api.before = before
        api.close_watches()
        await eventually(lambda: not gone and watches() > seen + 1, "a watch after another list")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    groups = {plural: resource.group for plural, resource in api._resources.items()}
    asked = {(groups[call.plural], call.plural, call.verb) for call in api.calls}
    (rule,) = router_role(make_model({}))["rules"]
    assert {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]} == asked


def test_the_fake_refuses() -> None:
    """The test above would pass on rights that nothing checks: the names must be those of the API."""
    assert {right[1].split("/")[0] for right in granted()} <= set(FakeApi()._resources)
    assert Refused(403, "Forbidden").status == 403
