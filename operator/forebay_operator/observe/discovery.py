"""What the cluster has beside models: optional kinds, and the settings of the operator that runs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forebay_operator.api import labels
from forebay_operator.build.surroundings import NOWHERE, Surroundings
from forebay_operator.kube import DEPLOYMENTS, POD_MONITORS, Forbidden, Kube, NotFound

OPERATOR_SELECTOR = "app.kubernetes.io/name=forebay-operator"


async def has_pod_monitors(kube: Kube, namespaces: Sequence[str]) -> bool:
    """Whether the cluster has that kind, and we may use it in one of `namespaces` at least (none: in all): another may
    be gone, and its rights with it."""
    for namespace in namespaces or (None,):
        try:
            # Ours only: whether the list is answered is what counts, and a cluster may have thousands of others.
            await kube.list(POD_MONITORS, namespace, selector=labels.MODEL)
        except (NotFound, Forbidden):
            continue
        return True
    return False


async def find_operators(kube: Kube) -> list[Mapping[str, Any]] | None:
    """Deployments of operators, in all namespaces; None when they may not be listed."""
    try:
        return list(await kube.list(DEPLOYMENTS, None, selector=OPERATOR_SELECTOR))
    except Forbidden:
        return None


def served_namespaces(operator: Mapping[str, Any]) -> tuple[str, ...]:
    """Namespaces that an operator's Deployment serves; empty: all."""
    return tuple(value for name, value in _arguments(operator) if name == "--namespace")


def surroundings_of(operator: Mapping[str, Any] | None, *, pod_monitors: bool) -> Surroundings:
    """What an operator builds children with, read off its own Deployment's arguments. None: the defaults."""
    if operator is None:
        return Surroundings(pod_monitors=pod_monitors)
    arguments = _arguments(operator)
    given = dict(arguments)
    ports = tuple(int(value) for name, value in arguments if name == "--api-server-port" and value.isdigit())
    return Surroundings(
        operator_namespace=operator["metadata"]["namespace"],
        operator_labels=NOWHERE.operator_labels,
        monitoring_namespace=given.get("--monitoring-namespace"),
        api_server_ports=ports or NOWHERE.api_server_ports,
        pod_monitors=pod_monitors,
        engine_image=given.get("--engine-image"),
        router_image=given.get("--router-image"),
    )


def _arguments(operator: Mapping[str, Any]) -> list[tuple[str, str]]:
    containers = operator["spec"]["template"]["spec"]["containers"]
    words = [str(w) for c in containers if c["name"] == "operator" for w in (*c.get("command", []), *c.get("args", []))]
    pairs: list[tuple[str, str]] = []
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if not separator and index + 1 < len(words):
            value = words[index + 1]
        if name.startswith("--"):
            pairs.append((name, value))
    return pairs
