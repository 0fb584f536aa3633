"""What a builder must know beside the model: where the operator runs and what the cluster has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The operator's settings and discovery, as far as children depend on them. The default is "no cluster known"."""

    operator_namespace: str | None = None
    """None: no NetworkPolicy lets an operator in."""

    operator_labels: Mapping[str, str] = field(default_factory=lambda: {"app.kubernetes.io/name": "forebay-operator"})
    monitoring_namespace: str | None = None
    """Where Prometheus runs: NetworkPolicies let it scrape. None: they don't."""

    api_server_ports: tuple[int, ...] = (443, 6443)
    """Those of its Service and of its own: by network plugin a NetworkPolicy sees the one or the other."""

    pod_monitors: bool = False
    """The cluster has the kind PodMonitor (monitoring.coreos.com/v1)."""

    engine_image: str | None = None
    """For models that name none. Workers roll when it changes: it is part of their pod template."""

    router_image: str | None = None


NOWHERE = Surroundings()
