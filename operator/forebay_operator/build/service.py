"""The router's Service: what clients talk to."""

from __future__ import annotations

from typing import Any

from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build import ports
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import router_name, selector


def router_service(model: DisaggregatedModel) -> dict[str, Any]:
    name = model.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, router_name(name), "router"),
        "spec": {
            "type": model.spec.router.service_type,
            "selector": selector(name, "router"),
            "ports": [{"name": "http", "port": ports.HTTP, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def endpoint_url(name: str, namespace: str) -> str:
    """Base URL of a model's OpenAI API inside the cluster. Short enough to resolve under any cluster domain."""
    return f"http://{router_name(name)}.{namespace}.svc:{ports.HTTP}/v1"
