"""The router's identity: it watches the pods of its namespace, and may do nothing else."""

from __future__ import annotations

from typing import Any

from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.meta import metadata
from forebay_operator.build.names import router_name


def router_service_account(model: DisaggregatedModel) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(model, router_name(model.metadata.name), "router"),
        # The pod asks for the token itself, so that nothing else that runs under this account gets one.
        "automountServiceAccountToken": False,
    }


def router_role(model: DisaggregatedModel) -> dict[str, Any]:
    """RBAC can't narrow a list or watch to labels: the router sees all pods of its namespace, and only pods."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(model, router_name(model.metadata.name), "router"),
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}],
    }


def router_role_binding(model: DisaggregatedModel) -> dict[str, Any]:
    name = router_name(model.metadata.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(model, name, "router"),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": model.metadata.namespace}],
    }
