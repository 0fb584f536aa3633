"""Deterministic names of child objects, at most 63 characters, and the labels that tie them to their model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from forebay_operator.api import labels

MAX_NAME = 63


def child_name(model: str, *suffix: str) -> str:
    """`<model>-<suffix>`; a name that would be too long keeps its head and gets a hash of the whole model name."""
    full = "-".join((model, *suffix))
    if len(full) <= MAX_NAME:
        return full
    tail = "-".join((hashlib.sha256(model.encode()).hexdigest()[:8], *suffix))
    return f"{model[: MAX_NAME - len(tail) - 1].rstrip('-')}-{tail}"


def router_name(model: str) -> str:
    return child_name(model, "router")


def token_secret_name(model: str) -> str:
    return child_name(model, "token")


def workers_map_name(model: str) -> str:
    return child_name(model, "workers")


def selector(model: str, component: str) -> dict[str, str]:
    return {labels.MODEL: model, "app.kubernetes.io/component": component}


def common_labels(model: str, component: str) -> dict[str, str]:
    return {
        **selector(model, component),
        "app.kubernetes.io/name": "forebay",
        "app.kubernetes.io/instance": model,
        "app.kubernetes.io/managed-by": "forebay",
    }


def content_hash(value: Any) -> str:
    """Eight hex digits over canonical JSON: the revision of a pod template."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
