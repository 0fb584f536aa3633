"""Whether nodes are there for a model, with the numbers, before a pod is made."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api.conditions import Reason
from forebay_operator.build.worker import worker_template
from forebay_operator.observe.types import NodeView
from forebay_operator.status.pinning import asked, check_pinning
from support.manifests import make_model

GPU = "nvidia.com/gpu"


def node(name: str, gpus: int = 0, cordoned: bool = False, **labels: str) -> NodeView:
    return NodeView(name, labels, {GPU: gpus} if gpus else {}, cordoned=cordoned)


H100 = {"prefill.nodeSelector": {"gpu": "h100"}, "decode.nodeSelector": {"gpu": "h200"}}


@pytest.mark.parametrize(
    ("changes", "nodes", "reason", "message"),
    [
        ({}, [node("a", 2)], Reason.NODES_MATCH, "prefill: 1 node with 2 nvidia.com/gpu; decode: 1 node with 2"),
        ({}, [], Reason.NO_MATCHING_NODE, "prefill: the cluster has no nodes"),
        (
            {},
            [node("a")],
            Reason.TOO_FEW_GPUS,
            "prefill: 1 worker of 1 nvidia.com/gpu each must fit, and there is room for 0 (0 allocatable on 1 node)",
        ),
        (
            {},
            [node("a", 1)],
            Reason.TOO_FEW_GPUS,
            "both pools together need 2 nvidia.com/gpu; the nodes they select have 1 allocatable",
        ),
        (H100, [node("a", 1, gpu="h100"), node("b", 1, gpu="h200")], Reason.NODES_MATCH, "1 node with gpu=h100 with 1"),
        (
            H100,
            [node("a", 8, gpu="h100"), node("b", 8, gpu="a100")],
            Reason.NO_MATCHING_NODE,
            "decode: none of 2 nodes has gpu=h200; there are a100, h100",
        ),
        (
            H100,
            [node("a", 8), node("b", 8)],
            Reason.NO_MATCHING_NODE,
            "prefill: none of 2 nodes has the label gpu; label nodes or correct nodeSelector; decode: none of 2",
        ),
        (
            {"decode.nodeSelector": {"a": "1", "b": "1"}},
            [node("a", 8, a="1", b="2"), node("b", 8, a="2", b="1")],
            Reason.NO_MATCHING_NODE,
            "decode: none of 2 nodes has all 2 labels of nodeSelector at once",
        ),
        (
            {"decode.gpus": {"count": 2}, "decode.replicas": 2, "decode.nodeSelector": {"gpu": "x"}},
            [node("a", 8), node("b", 3, gpu="x"), node("c", 1, gpu="x")],
            Reason.TOO_FEW_GPUS,
            "decode: 2 workers of 2 nvidia.com/gpu each must fit, and there is room for 1 (4 allocatable on 2",
        ),
        ({}, [node("a", 8, cordoned=True)], Reason.TOO_FEW_GPUS, "there is room for 0 (0 allocatable on 1 node)"),
        (
            {"prefill.gpus": {"count": 0}, "decode.gpus": {"count": 0}},
            [node("a")],
            Reason.NODES_MATCH,
            "prefill: 1 node;",
        ),
        (
            {"prefill.gpus": {"resource": "amd.com/gpu"}},
            [node("a", 8)],
            Reason.TOO_FEW_GPUS,
            "prefill: 1 worker of 1 amd.com/gpu each must fit, and there is room for 0",
        ),
        (
            {
                "decode.replicas": ...,
                "scaling.decode": {"minReplicas": 2, "maxReplicas": 100},
                "prefill.gpus": {"count": 0},
            },
            [node("a", 2)],
            Reason.NODES_MATCH,
            "decode: 1 node with 2 nvidia.com/gpu",
        ),
    ],
)
def test_pinning(changes: dict[str, Any], nodes: list[NodeView], reason: Reason, message: str) -> None:
    pinning = check_pinning(make_model(changes).spec, nodes)
    assert (pinning.reason, pinning.satisfied) == (reason, reason is Reason.NODES_MATCH)
    assert message in pinning.message


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


CLAIMED = {"$patch": "replace", "requests": {"cpu": "2"}, "claims": [{"name": "gpu"}]}
"""As in docs/kubernetes.md."""


@pytest.mark.parametrize(
    ("template", "there", "room"),
    [
        (engine(resources=CLAIMED), {"gpu": "h200"}, True),
        (engine(resources={"limits": {"$patch": "delete"}}), {"gpu": "h200"}, True),
        (engine(resources={"limits": {GPU: {"$patch": "delete"}}}), {"gpu": "h200"}, True),
        (engine(resources={"limits": {"amd.com/gpu": 1}}), {"gpu": "h200"}, False),
        (engine(resources={"limits": {GPU: "many"}}), {"gpu": "h200"}, True),
        (engine(image="e:2"), {"gpu": "h200"}, False),
        ({"spec": {"nodeSelector": {"$patch": "replace", "zone": "a"}}}, {"zone": "a"}, False),
        ({"metadata": {"annotations": {"a": "b"}}}, {"gpu": "h200"}, False),
    ],
)
def test_a_pod_template_has_the_last_word(template: dict[str, Any], there: dict[str, str], room: bool) -> None:
    """Nodes with the labels, and no GPU of a device plugin."""
    model = make_model({"prefill.gpus": {"count": 0}, "decode.nodeSelector": {"gpu": "h200"},
                        "decode.podTemplate": template})  # fmt: skip
    pinning = check_pinning(model.spec, [node("a", 0, **there)])
    assert pinning.reason is (Reason.NODES_MATCH if room else Reason.TOO_FEW_GPUS), pinning.message
    assert check_pinning(model.spec, [node("a", 8)]).reason is Reason.NO_MATCHING_NODE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"decode.gpus": {"count": 0}},
        {"decode.gpus": {"resource": "amd.com/gpu", "count": 4}, "decode.nodeSelector": {"a": "b"}},
        {"decode.podTemplate": engine(resources=CLAIMED)},
        {"decode.podTemplate": engine(resources={"limits": {GPU: 2}})},
        {"decode.nodeSelector": {"a": "b"}, "decode.podTemplate": {"spec": {"nodeSelector": {"c": "d"}}}},
        {"decode.podTemplate": {"spec": {"nodeSelector": None, "containers": [{"name": "sidecar"}]}}},
    ],
)
def test_what_is_judged_is_what_the_pods_ask_for(changes: dict[str, Any]) -> None:
    model = make_model(changes)
    found, pod = asked(model.spec, "decode"), worker_template(model, "decode")["spec"]
    container = next(c for c in pod["containers"] if c["name"] == "engine")
    assert found.selector == pod.get("nodeSelector", {})
    assert found.count == int(container["resources"].get("limits", {}).get(found.resource, 0))


def test_without_the_right_to_read_nodes_nothing_is_claimed() -> None:
    pinning = check_pinning(make_model().spec, None)
    assert (pinning.satisfied, pinning.reason) == (None, Reason.NODES_NOT_READABLE)


sizes = st.lists(st.integers(0, 8), max_size=5)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 8))
def test_more_nodes_never_take_a_yes_back(gpus: list[int], per_worker: int, workers: int, more: int) -> None:
    spec = make_model({"decode.gpus": {"count": per_worker}, "decode.replicas": workers}).spec
    nodes = [node(str(index), count) for index, count in enumerate(gpus)]
    if check_pinning(spec, nodes).satisfied:
        assert check_pinning(spec, [*nodes, node("more", more)]).satisfied
        assert sum(gpus) >= per_worker * workers + 1
