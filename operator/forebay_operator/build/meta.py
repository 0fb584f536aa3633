"""What every child object carries: name, labels, owner."""

from __future__ import annotations

from typing import Any

from forebay_operator.api.labels import API_VERSION, KIND
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.names import common_labels


def metadata(model: DisaggregatedModel, name: str, component: str, **labels: str) -> dict[str, Any]:
    """Labels and annotations of the model itself are never copied: GitOps tools would take its children for theirs."""
    return {
        "name": name,
        "namespace": model.metadata.namespace,
        "labels": {**common_labels(model.metadata.name, component), **labels},
    }


def owned(child: dict[str, Any], model: DisaggregatedModel, uid: str) -> dict[str, Any]:
    """`child` with the model as its controller: the cluster deletes it with the model, the operator up or not."""
    reference = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": model.metadata.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {**child, "metadata": {**child["metadata"], "ownerReferences": [reference]}}
