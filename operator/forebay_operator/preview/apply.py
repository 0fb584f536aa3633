"""The model as it would be after `kubectl apply -f`: tried by the API server, or merged here where it may not be."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Final

from forebay_operator.api.labels import FIELD_MANAGER
from forebay_operator.kube import MODELS, Forbidden, Kube, Object

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
KUBECTL: Final = "kubectl"


async def as_applied(kube: Kube, written: Object, live: Object | None, notes: list[str]) -> Object:
    """Raises ApiError: Invalid with the API server's words when it would refuse the spec.

    A field that the file leaves out goes when the file's earlier version set it, and stays when somebody else did (such
    as spec.replicas set by `kubectl scale`).
    """
    try:
        if live is None:
            return copy.deepcopy(await kube.apply(MODELS, written, force=True, dry_run=True, manager=KUBECTL))
        manager = applier(live)
        if manager is not None:
            return copy.deepcopy(await kube.apply(MODELS, written, force=True, dry_run=True, manager=manager))
        patch = merge_patch(last_applied(live), {"spec": written["spec"]})
        meta = live["metadata"]
        return copy.deepcopy(await kube.merge(MODELS, meta["namespace"], meta["name"], patch, dry_run=True))
    except Forbidden as error:
        if "cannot patch" not in error.message and "cannot create" not in error.message:
            raise
        notes.append("DisaggregatedModels may not be written with this kubeconfig; the spec was checked here only")
    if live is None:
        return copy.deepcopy(written)
    return merged(live, merge_patch(last_applied(live), {"spec": written["spec"]}))


def applier(live: Mapping[str, Any]) -> str | None:
    """Who applies this object server-side; None when it is applied client-side."""
    for entry in live["metadata"].get("managedFields") or []:
        manager = entry.get("manager")
        ours = manager == FIELD_MANAGER or entry.get("subresource")
        if entry.get("operation") == "Apply" and not ours and "f:spec" in (entry.get("fieldsV1") or {}):
            return str(manager)
    return None


def last_applied(live: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec that `kubectl apply` sent last; empty when that is not known."""
    text = (live["metadata"].get("annotations") or {}).get(LAST_APPLIED)
    try:
        held = json.loads(text) if text else {}
    except ValueError:
        return {}
    return {"spec": held["spec"]} if isinstance(held, dict) and isinstance(held.get("spec"), dict) else {}


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386: `after`, with a null for each field of `before` that it has no more."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        held = before.get(key)
        if isinstance(value, Mapping):
            value = merge_patch(held if isinstance(held, Mapping) else {}, value)
        patch[key] = value
    return patch


def merged(obj: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(dict(obj))
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping):
            held = out.get(key)
            out[key] = merged(held if isinstance(held, Mapping) else {}, value)
        else:
            out[key] = value
    return out
