"""podTemplate, the escape hatch: what a user writes over what we built."""

from __future__ import annotations

import copy
from typing import Any

from forebay_operator.api import labels


def merge(base: Any, patch: Any) -> Any:
    """`patch` over `base`, as a new value.

    Maps merge by key and null removes a key. Lists whose items all have a `name` merge by it (containers, env, ports,
    volumes), in the order of `base`, new items last; any other list, or scalar, is replaced.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = {key: copy.deepcopy(value) for key, value in base.items() if patch.get(key, value) is not None}
        for key, value in patch.items():
            if value is not None:
                merged[key] = merge(base.get(key), value)
        return merged
    if isinstance(patch, dict):
        return {key: merge(None, value) for key, value in patch.items() if value is not None}
    if _named(base) and _named(patch):
        patches = {item["name"]: item for item in patch}
        merged_items = [
            merge(item, patches.pop(item["name"])) if item["name"] in patches else copy.deepcopy(item) for item in base
        ]
        return merged_items + [merge(None, item) for item in patches.values()]
    return copy.deepcopy(patch)


def _named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and "name" in i for i in value)


def merge_template(built: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`patch` over a built pod template, whose own labels stay: the selector needs them.

    A role among the patch's labels is dropped, for it would come back with every new pod.
    """
    merged: dict[str, Any] = merge(built, patch)
    theirs = merged.setdefault("metadata", {}).get("labels", {})
    kept = {key: value for key, value in theirs.items() if key != labels.ROLE}
    merged["metadata"]["labels"] = kept | built["metadata"]["labels"]
    return merged
