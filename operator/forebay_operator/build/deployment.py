"""The frame of a Deployment around a pod template."""

from __future__ import annotations

from typing import Any


def deployment(
    *,
    metadata: dict[str, Any],
    selector: dict[str, str],
    replicas: int | None,
    template: dict[str, Any],
    strategy: dict[str, Any] | None = None,
    progress_deadline_seconds: int | None = None,
) -> dict[str, Any]:
    """`replicas` None leaves the count out: server-side apply then keeps the live one."""
    spec: dict[str, Any] = {} if replicas is None else {"replicas": replicas}
    spec["revisionHistoryLimit"] = 0
    if progress_deadline_seconds is not None:
        spec["progressDeadlineSeconds"] = progress_deadline_seconds
    if strategy is not None:
        spec["strategy"] = strategy
    spec["selector"] = {"matchLabels": selector}
    spec["template"] = template
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
