"""Who of a model is connected to whom on the cluster, and what its NetworkPolicies say of that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.connections import Connection, Judge, connections, parse
from e2e.on_kubernetes.deployed import CLIENT, OPERATOR_NAMESPACE, Deployed
from forebay_operator import kube as k
from support.network_policies import Host


async def seen(deployed: Deployed, site: KubernetesSite) -> set[Connection]:
    """TCP connections of the model's, the operators' and the client's pods at this moment."""
    pods = [*await site.pods(), *await site.routers(), *await site.kube.list(k.PODS, OPERATOR_NAMESPACE)]
    pods.append(await site.kube.get(k.PODS, site.namespace, CLIENT))
    tables = await asyncio.gather(*(asyncio.to_thread(_sockets, deployed, pod) for pod in pods))
    return {connection for table in tables for connection in connections(parse(table))}


def _sockets(deployed: Deployed, pod: dict[str, Any]) -> str:
    """What `ss -ta` reads, which the images lack."""
    meta = pod["metadata"]
    words = ("exec", meta["name"], "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
    return deployed.kubectl("-n", meta["namespace"], *words)


async def judge(deployed: Deployed) -> Judge:
    """By the policies, pods and Services that there are."""
    kinds = ("pods", "services", "nodes", "networkpolicies")
    listed = await asyncio.gather(*(asyncio.to_thread(_items, deployed, kind) for kind in kinds))
    pods, services, nodes, policies = listed
    hosts: dict[str, Host] = {}
    for pod in pods:
        if address := pod["status"].get("podIP"):
            hosts[address] = Host(pod["metadata"]["namespace"], pod["metadata"].get("labels") or {})
    behind = {
        service["spec"]["clusterIP"]: tuple(
            host
            for host in hosts.values()
            if (selector := service["spec"].get("selector"))
            and host.namespace == service["metadata"]["namespace"]
            and selector.items() <= host.labels.items()
        )
        for service in services
    }
    # A node's pods see its own bridge's address, the first of its range.
    own = {a["address"] for node in nodes for a in node["status"]["addresses"]}
    bridges = {address.rsplit(".", 1)[0] + ".1" for address in hosts}
    return Judge(tuple(policies), hosts, behind, frozenset(own | bridges))


def _items(deployed: Deployed, kind: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(deployed.kubectl("get", kind, "-A", "-o", "json"))["items"]
    return listed
