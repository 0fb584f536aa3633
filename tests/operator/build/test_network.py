"""NetworkPolicies: who reaches whom, and on which ports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build import ports
from forebay_operator.build.network import router_network_policy, worker_network_policy
from forebay_operator.build.router import router_template
from forebay_operator.build.surroundings import Surroundings
from forebay_operator.build.worker import worker_template
from support.manifests import make_model
from support.network_policies import Host, connects

SURROUNDINGS = Surroundings("forebay-system", {"app": "operator"}, "monitoring")


def pods(model: DisaggregatedModel) -> dict[str, Host]:
    def worker(pool: Any) -> Host:
        return Host("llm", worker_template(model, pool)["metadata"]["labels"])

    foreign = make_model({"metadata.name": "b"})
    return {
        "prefill": worker("prefill"),
        "decode": worker("decode"),
        "router": Host("llm", router_template(model)["metadata"]["labels"]),
        "operator": Host("forebay-system", {"app": "operator"}),
        "impostor": Host("llm", {"app": "operator"}),
        "prometheus": Host("monitoring", {"any": "thing"}),
        "neighbour": Host("llm", {"app": "other"}),
        "foreign worker": Host("llm", worker_template(foreign, "decode")["metadata"]["labels"]),
        "same model elsewhere": Host("other", worker_template(model, "decode")["metadata"]["labels"]),
        "outside": Host(None, {}),
    }


def policies(model: DisaggregatedModel, surroundings: Surroundings = SURROUNDINGS) -> list[dict[str, Any]]:
    built = [worker_network_policy(model, surroundings), router_network_policy(model, surroundings)]
    assert all(policy is not None for policy in built)
    return [policy for policy in built if policy is not None]


UCX = ports.UCX_TCP_FIRST + 7
API_SERVER = 6443


@pytest.mark.parametrize(
    ("source", "target", "port", "allowed"),
    [
        ("router", "prefill", ports.HTTP, True),
        ("router", "decode", ports.HTTP, True),
        ("router", "decode", UCX, False),
        ("prefill", "decode", ports.HTTP, True),
        ("decode", "prefill", ports.HTTP, True),
        ("decode", "prefill", UCX, True),
        ("decode", "decode", ports.UCX_TCP_LAST, True),
        ("decode", "prefill", ports.UCX_TCP_LAST + 1, False),
        ("decode", "prefill", 22, False),
        ("operator", "decode", ports.HTTP, True),
        ("operator", "decode", UCX, False),
        ("operator", "router", ports.HTTP, True),
        ("impostor", "decode", ports.HTTP, False),
        ("prometheus", "decode", ports.HTTP, True),
        ("prometheus", "router", ports.HTTP, True),
        ("neighbour", "decode", ports.HTTP, False),
        ("neighbour", "router", ports.HTTP, True),
        ("foreign worker", "decode", ports.HTTP, False),
        ("foreign worker", "decode", UCX, False),
        ("same model elsewhere", "decode", UCX, False),
        ("outside", "decode", ports.HTTP, False),
        ("outside", "router", ports.HTTP, True),
        ("outside", "router", 9000, False),
        ("router", "outside", API_SERVER, True),
        ("router", "outside", 53, True),
        ("router", "outside", 80, False),
        ("decode", "outside", API_SERVER, False),
        ("decode", "outside", 443, False),
        ("decode", "outside", 53, True),
        ("decode", "router", ports.HTTP, False),
    ],
)
def test_who_reaches_whom(source: str, target: str, port: int, allowed: bool) -> None:
    model = make_model()
    hosts = pods(model)
    assert connects(policies(model), hosts[source], hosts[target], port) is allowed


def test_names_are_looked_up_over_udp() -> None:
    model = make_model()
    hosts = pods(model)
    assert connects(policies(model), hosts["decode"], hosts["outside"], 53, "UDP")
    assert not connects(policies(model), hosts["decode"], hosts["outside"], 123, "UDP")


def test_without_settings_neither_operator_nor_prometheus_gets_in() -> None:
    model = make_model()
    hosts, made = pods(model), policies(model, Surroundings())
    assert not connects(made, hosts["operator"], hosts["decode"], ports.HTTP)
    assert not connects(made, hosts["prometheus"], hosts["decode"], ports.HTTP)


def test_only_a_worker_that_fetches_its_model_may_leave_the_cluster() -> None:
    model = make_model({"model.source": "cache://smollm2-135m"})
    hosts = pods(model)
    assert connects(policies(model), hosts["decode"], hosts["outside"], 443)


def test_routers_reach_the_api_server_by_its_ports() -> None:
    """A plugin that sees the server's own port, and not its Service's, would keep routers from finding any worker."""
    model = make_model({})

    def reach(surroundings: Surroundings) -> dict[int, bool]:
        held, host = policies(model, surroundings), pods(model)
        return {port: connects(held, host["router"], host["outside"], port) for port in (443, 6443, 16443)}

    assert reach(SURROUNDINGS) == {443: True, 6443: True, 16443: False}
    given = replace(SURROUNDINGS, api_server_ports=(443, 16443))
    assert reach(given) == {443: True, 6443: False, 16443: True}
