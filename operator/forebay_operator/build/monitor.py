"""A PodMonitor over routers and workers, where Prometheus' operator has brought that kind."""

from __future__ import annotations

from typing import Any

from forebay_operator.api import labels
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.meta import metadata
from forebay_operator.build.surroundings import NOWHERE, Surroundings
from forebay_wire.paths import METRICS


def pod_monitor(model: DisaggregatedModel, surroundings: Surroundings = NOWHERE) -> dict[str, Any] | None:
    """None where the kind is not installed. Pods keep their labels, so that metrics can be told apart by pool."""
    if not surroundings.pod_monitors:
        return None
    name = model.metadata.name
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(model, name, "monitor"),
        "spec": {
            "selector": {"matchLabels": {labels.MODEL: name}},
            "podTargetLabels": [labels.MODEL, labels.POOL, labels.REVISION],
            "podMetricsEndpoints": [{"port": "http", "path": METRICS}],
        },
    }
