"""NetworkPolicies: who may talk to a model's pods, and whom they may talk to. Everything else is refused.

RDMA and secondary networks bypass them: they filter the pod network alone (docs/security.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forebay_operator.api.source import Scheme
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build import ports
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import child_name, router_name, selector
from forebay_operator.build.surroundings import NOWHERE, Surroundings

Peer = dict[str, Any]
Rule = dict[str, Any]

_HTTP = {"protocol": "TCP", "port": ports.HTTP}
_UCX = {"protocol": "TCP", "port": ports.UCX_TCP_FIRST, "endPort": ports.UCX_TCP_LAST}
_HTTPS = {"protocol": "TCP", "port": 443}
# To any address: node-local DNS caches listen on link-local ones, which no selector matches.
_DNS: Rule = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def worker_network_policy(model: DisaggregatedModel, surroundings: Surroundings = NOWHERE) -> dict[str, Any] | None:
    """Workers: HTTP from routers, the operator and Prometheus; HTTP and UCX from and to workers of the same model."""
    if model.spec.network_policy == "Disabled":
        return None
    name = model.metadata.name
    workers = _pods(selector(name, "worker"))
    callers = [_pods(selector(name, "router")), *_operator(surroundings), *_monitoring(surroundings)]
    egress: list[Rule] = [{"to": [workers], "ports": [_HTTP, _UCX]}, _DNS]
    source = model.spec.model.parsed_source()
    if source is not None and source.scheme is Scheme.CACHE:
        egress.append({"ports": [_HTTPS]})  # the init container fetches the model from wherever it is kept
    return _policy(
        model,
        child_name(name, "workers"),
        "worker",
        ingress=[{"from": [workers], "ports": [_HTTP, _UCX]}, {"from": callers, "ports": [_HTTP]}],
        egress=egress,
    )


def router_network_policy(model: DisaggregatedModel, surroundings: Surroundings = NOWHERE) -> dict[str, Any] | None:
    """Router: HTTP from anywhere, since clients are; to workers, to the API server (pod watch) and to DNS."""
    if model.spec.network_policy == "Disabled":
        return None
    name = model.metadata.name
    return _policy(
        model,
        router_name(name),
        "router",
        ingress=[{"ports": [_HTTP]}],
        egress=[
            {"to": [_pods(selector(name, "worker"))], "ports": [_HTTP]},
            # No selector can name the API server: it is no pod. Policies see its Service or its own port, by plugin.
            {"ports": [{"protocol": "TCP", "port": port} for port in surroundings.api_server_ports]},
            _DNS,
        ],
    )


def _policy(
    model: DisaggregatedModel, name: str, component: str, *, ingress: list[Rule], egress: list[Rule]
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, name, component),
        "spec": {
            "podSelector": {"matchLabels": selector(model.metadata.name, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _pods(labels: dict[str, str]) -> Peer:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _operator(surroundings: Surroundings) -> Iterable[Peer]:
    if surroundings.operator_namespace is not None:
        yield {**_namespace(surroundings.operator_namespace), **_pods(dict(surroundings.operator_labels))}


def _monitoring(surroundings: Surroundings) -> Iterable[Peer]:
    if surroundings.monitoring_namespace is not None:
        yield _namespace(surroundings.monitoring_namespace)


def _namespace(name: str) -> Peer:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
