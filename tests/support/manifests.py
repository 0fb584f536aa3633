"""DisaggregatedModels for tests, from a small valid one and changes by dotted path."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from forebay_operator.api.load import load_manifest
from forebay_operator.api.v1alpha1 import DisaggregatedModel

MINIMAL: dict[str, Any] = {
    "apiVersion": "serving.forebay.dev/v1alpha1",
    "kind": "DisaggregatedModel",
    "metadata": {"name": "assistant", "namespace": "llm"},
    "spec": {
        "model": {"source": "pvc://models/llama", "servedName": "llama"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """MINIMAL with values set (or, for `...`, removed) by dotted path below spec, or below metadata."""
    manifest = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        node = manifest if path.startswith("metadata.") else manifest["spec"]
        *above, last = path.split(".")
        for step in above:
            node = node.setdefault(step, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return manifest


def make_model(changes: dict[str, Any] | None = None) -> DisaggregatedModel:
    return load_manifest(yaml.safe_dump(changed(changes or {})), "test").model
