"""A cluster that the suite is given is looked at first, and is at the end what it was before."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from e2e.on_kubernetes import lent
from e2e.on_kubernetes.deployed import NAMESPACE, OPERATOR_NAMESPACE, POOL_LABEL

NAMESPACES = (OPERATOR_NAMESPACE, NAMESPACE)
Object = dict[str, Any]


def node(name: str, *, labels: dict[str, str] | None = None, gpus: int = 0, taints: tuple[str, ...] = ()) -> Object:
    resources = {"cpu": "8", **({lent.GPU: str(gpus)} if gpus else {})}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}, "annotations": {}},
        "spec": {"taints": [{"key": "k", "effect": effect} for effect in taints]} if taints else {},
        "status": {"capacity": dict(resources), "allocatable": dict(resources)},
    }


class Kubectl:
    """What of kubectl is used, on objects in memory."""

    def __init__(self, *nodes: Object, namespaces: dict[str, dict[str, str]] | None = None, crd: bool = False) -> None:
        self.nodes = {each["metadata"]["name"]: each for each in nodes}
        self.namespaces = namespaces or {}
        self.crd = crd
        self.touched: set[str] = set()

    def __call__(self, *words: Any, **_: Any) -> str:
        match words:
            case ("get", "namespaces", "-o", "json"):
                items = [{"metadata": {"name": name, "labels": marks}} for name, marks in self.namespaces.items()]
                return json.dumps({"items": items})
            case ("get", "nodes", "-o", "json"):
                return json.dumps({"items": list(self.nodes.values())})
            case ("get", "crd", name, "--ignore-not-found"):
                return name if self.crd else ""
            case ("annotate", "node", name, pair):
                key, _, value = pair.partition("=")
                self._node(name)["metadata"]["annotations"][key] = value
            case ("label", "node", name, pair):
                key, _, value = pair.partition("=")
                self._node(name)["metadata"]["labels"][key] = value
            case ("cordon", name):
                self._node(name)["spec"] = {"unschedulable": True, "taints": [{"effect": "NoSchedule"}]}
            case ("uncordon", name):
                self._node(name)["spec"] = {}
            case ("patch", "node", name, *options, "-p", patch):
                changes = json.loads(patch)
                assert ("--subresource=status" in options) == ("status" in changes)
                _merge(self._node(name), changes)
            case ("delete", "namespace", selector, field, "--wait"):
                name = field.removeprefix("--field-selector=metadata.name=")
                if selector.removeprefix("--selector=") in self.namespaces.get(name, {}):
                    del self.namespaces[name]
            case _:
                raise AssertionError(words)
        return ""

    def _node(self, name: str) -> Object:
        self.touched.add(name)
        return self.nodes[name]

    def objects(self) -> Any:
        return copy.deepcopy((self.nodes, self.namespaces))


def _merge(held: Object, changes: Object) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            _merge(held[key], value)
        elif value is None:
            held.pop(key, None)
        else:
            held[key] = value


def begin(kubectl: Kubectl) -> list[str]:
    """What the suite does to nodes and namespaces."""
    lent.check(kubectl, NAMESPACES)
    listed = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    chosen = lent.usable(listed)[:2]
    for each in listed:
        if each["metadata"]["name"] in chosen:
            lent.take(kubectl, each, POOL_LABEL)
    gpus = json.dumps({"status": {"capacity": {lent.GPU: "8"}, "allocatable": {lent.GPU: "8"}}})
    for name, pool in zip(chosen, ("prefill", "decode"), strict=True):
        kubectl("label", "node", name, f"{POOL_LABEL}={pool}")
        kubectl("patch", "node", name, "--subresource=status", "-p", gpus)
    for name in NAMESPACES:
        kubectl.namespaces[name] = {lent.MARK: "true"}
    kubectl.crd = True
    return chosen


def cluster() -> Kubectl:
    return Kubectl(
        node("control", taints=("NoSchedule",)),
        node("gpu", gpus=4),
        node("a", labels={POOL_LABEL: "theirs"}),
        node("b", taints=("PreferNoSchedule",)),
        node("c"),
        namespaces={"default": {}, "kube-system": {}},
    )


@pytest.mark.parametrize("killed", [False, True], ids=["once", "after a killed run"])
def test_it_is_left_as_it_was(killed: bool) -> None:
    kubectl = cluster()
    del kubectl.nodes["b"]["spec"]["taints"]
    before = kubectl.objects()
    assert begin(kubectl) == ["a", "b"]
    kubectl("cordon", "b")
    if killed:
        assert begin(kubectl) == ["a", "b"], "the same nodes: those have its marks"
        assert "taints" not in kubectl.nodes["b"]["spec"], "and work again"
    assert kubectl.objects() != before
    lent.give_back(kubectl, POOL_LABEL, NAMESPACES)
    assert kubectl.objects() == before
    assert kubectl.touched == {"a", "b"}


def test_nodes_with_gpus_of_their_own_are_left_alone() -> None:
    listed = list(cluster().nodes.values())
    assert lent.usable(listed) == ["a", "b", "c"]


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_of_others_is_not_taken_over(name: str) -> None:
    kubectl = cluster()
    kubectl.namespaces[name] = {"team": "them"}
    before = kubectl.objects()
    with pytest.raises(lent.Occupied, match=rf"a namespace {name} already.*use another cluster, or delete it"):
        lent.check(kubectl, NAMESPACES)
    lent.give_back(kubectl, POOL_LABEL, NAMESPACES)
    assert kubectl.objects() == before


def test_forebay_of_others_is_not_taken_over() -> None:
    kubectl = cluster()
    kubectl.crd = True
    with pytest.raises(lent.Occupied, match=r"CustomResourceDefinition disaggregatedmodels\..*without Forebay"):
        lent.check(kubectl, NAMESPACES)
    kubectl.namespaces[NAMESPACE] = {lent.MARK: "true"}
    lent.check(kubectl, NAMESPACES)  # an earlier run's
