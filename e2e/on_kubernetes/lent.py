"""A cluster of somebody else's: looked at before anything is changed, and left as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from forebay_operator.api.crd import NAME as CRD

MARK: Final = "forebay.dev/e2e"
"""Label of the namespaces that the suite made."""

BEFORE: Final = "forebay.dev/e2e-before"
"""Annotation of a node that the suite changed: what to put back, as JSON. On the node, for a run may be killed."""

GPU: Final = "nvidia.com/gpu"
_REMOVE_SECONDS: Final = 300.0

Kubectl = Callable[..., str]


class Occupied(Exception):
    """The suite would change what is not its own; the text names it and the remedy."""


def check(kubectl: Kubectl, namespaces: Sequence[str]) -> None:
    """Raises Occupied: one of the namespaces or Forebay is there already, and no earlier run of the suite made it."""
    found = json.loads(kubectl("get", "namespaces", "-o", "json"))["items"]
    marked = {each["metadata"]["name"]: MARK in each["metadata"].get("labels", {}) for each in found}
    for name in namespaces:
        if not marked.get(name, True):
            raise Occupied(
                f"the cluster has a namespace {name} already, and the suite removes the one of that name when it ends: "
                f"use another cluster, or delete it, or label it {MARK}=true if it may go"
            )
    if not any(marked.get(name) for name in namespaces) and kubectl("get", "crd", CRD, "--ignore-not-found"):
        raise Occupied(
            f"the cluster has the CustomResourceDefinition {CRD} already: the suite's operator would take over all "
            "models, and removing it at the end would delete them. Use a cluster without Forebay"
        )


def usable(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a lent cluster: schedulable, without GPUs of their own, or changed by an earlier run."""
    return [
        node["metadata"]["name"]
        for node in nodes
        if BEFORE in node["metadata"].get("annotations", {})
        or (not tainted(node) and GPU not in node["status"].get("capacity", {}))
    ]


def tainted(node: Mapping[str, Any]) -> bool:
    """So that no pod without a toleration runs there; a cordoned one is too."""
    return any(taint["effect"] != "PreferNoSchedule" for taint in node["spec"].get("taints", []))


def take(kubectl: Kubectl, node: Mapping[str, Any], label: str) -> None:
    """Write down, on the node, what the suite is about to change. A run that was killed has done so already."""
    meta = node["metadata"]
    if BEFORE in meta.get("annotations", {}):
        kubectl("uncordon", meta["name"])
        return
    before = json.dumps({"label": meta.get("labels", {}).get(label)})
    kubectl("annotate", "node", meta["name"], f"{BEFORE}={before}")


def give_back(kubectl: Kubectl, label: str, namespaces: Sequence[str]) -> None:
    """Nodes as they were, and no namespace of the suite's. Raises CommandFailed."""
    for name in namespaces:
        words = ("delete", "namespace", f"--selector={MARK}", f"--field-selector=metadata.name={name}")
        kubectl(*words, "--wait", seconds=_REMOVE_SECONDS)
    for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]:
        meta = node["metadata"]
        if BEFORE not in meta.get("annotations", {}):
            continue
        gone = json.dumps({"status": {"capacity": {GPU: None}, "allocatable": {GPU: None}}})
        kubectl("patch", "node", meta["name"], "--subresource=status", "--type=merge", "-p", gone)
        held = json.loads(meta["annotations"][BEFORE])
        back = {"metadata": {"labels": {label: held["label"]}, "annotations": {BEFORE: None}}}
        kubectl("uncordon", meta["name"])
        # Last: it says what is still to be done.
        kubectl("patch", "node", meta["name"], "--type=merge", "-p", json.dumps(back))
