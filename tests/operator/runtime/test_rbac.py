"""The chart's rights of the operator are the verbs that it uses: no more, no less."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.fake_cluster import FakeCluster, simulated_model
from support.fake_kube import FakeApi, Object, Refused, eventually
from support.operator_bench import operator

INSTALL = Path(__file__).parents[3] / "charts" / "install.yaml"

Right = tuple[str, str, str]
"""Group, resource, verb."""

NOT_SEEN: dict[Right, str] = {
    ("serving.forebay.dev", "disaggregatedmodels/finalizers", "update"): "asked for by an admission plugin only",
    ("", "pods", "get"): "the router's Role grants it, and nobody may give away what they don't have",
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


def test_the_fake_refuses() -> None:
    """The test above would pass on rights that nothing checks: the names must be those of the API."""
    assert {right[1].split("/")[0] for right in granted()} <= set(FakeApi()._resources)
    assert Refused(403, "Forbidden").status == 403
