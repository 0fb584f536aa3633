"""NetworkPolicies, judged as a network plugin would: may this pod open a connection to that port of the other?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Host:
    """A pod, or with no namespace something outside the cluster's pods (API server, client, DNS cache)."""

    namespace: str | None
    labels: dict[str, str]


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def _peer(peer: dict[str, Any], host: Host, home: str) -> bool:
    assert set(peer) <= {"podSelector", "namespaceSelector"}
    if host.namespace is None:
        return False
    if "namespaceSelector" in peer:
        names = {"kubernetes.io/metadata.name": host.namespace}
        if not _matches(peer["namespaceSelector"], names):
            return False
    elif host.namespace != home:
        return False
    return _matches(peer.get("podSelector", {}), host.labels)


def _allows(rule: dict[str, Any], key: str, host: Host, port: int, protocol: str, home: str) -> bool:
    opened = "ports" not in rule or any(
        entry["protocol"] == protocol and entry["port"] <= port <= entry.get("endPort", entry["port"])
        for entry in rule["ports"]
    )
    return opened and (key not in rule or any(_peer(peer, host, home) for peer in rule[key]))


def connects(policies: Iterable[dict[str, Any]], source: Host, target: Host, port: int, protocol: str = "TCP") -> bool:
    """Whether egress of the source and ingress of the target both let the connection through."""
    for host, other, direction, key in ((source, target, "egress", "to"), (target, source, "ingress", "from")):
        governing = [
            policy
            for policy in policies
            if host.namespace == policy["metadata"]["namespace"]
            and _matches(policy["spec"]["podSelector"], host.labels)
        ]
        if governing and not any(
            _allows(rule, key, other, port, protocol, policy["metadata"]["namespace"])
            for policy in governing
            for rule in policy["spec"][direction]
        ):
            return False
    return True
