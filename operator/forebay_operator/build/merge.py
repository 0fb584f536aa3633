"""podTemplate, the escape hatch: what a user writes over what we built."""

from __future__ import annotations

import copy
from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.api.fields import DIRECTIVE

_ABSENT: Final = object()


def merge(base: Any, patch: Any) -> Any:
    """`patch` over `base`, as a new value.

    Maps merge by key. Lists whose items all have a `name` merge by it (containers, env, ports, volumes), in the order
    of `base`, new items last; any other list, or scalar, is replaced. null, or a map with `$patch: delete`, removes a
    key or a named item; a map with `$patch: replace` takes the place of what was there.
    """
    merged = _merge(base, patch)
    return {} if merged is _ABSENT else merged


def _merge(base: Any, patch: Any) -> Any:
    """_ABSENT where the patch removes."""
    if patch is None:
        return _ABSENT
    if isinstance(patch, dict):
        directive = patch.get(DIRECTIVE)
        if directive == "delete":
            return _ABSENT
        under = base if isinstance(base, dict) and directive != "replace" else {}
        merged: dict[str, Any] = {}
        for key in dict.fromkeys((*under, *patch)):
            value = _merge(under.get(key), patch[key]) if key in patch else copy.deepcopy(under[key])
            if key != DIRECTIVE and value is not _ABSENT:
                merged[key] = value
        return merged
    if _named(base) and _named(patch):
        patches = {item["name"]: item for item in patch}
        items = [_merge(item, patches.pop(item["name"], {})) for item in base]
        items += [_merge(None, item) for item in patches.values()]
        return [item for item in items if item is not _ABSENT]
    return copy.deepcopy(patch)


def _named(value: Any) -> bool:
    """A name that is no string is the API server's to refuse."""
    named = isinstance(value, list) and bool(value)
    return named and all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value)


def merge_template(built: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`patch` over a built pod template, whose own labels stay: the selector needs them.

    A role or a mark of draining among the patch's labels is dropped, for it would come back with every new pod.
    """
    merged: dict[str, Any] = merge(built, patch)
    theirs = merged.setdefault("metadata", {}).get("labels", {})
    kept = {key: value for key, value in theirs.items() if key not in (labels.ROLE, labels.DRAINING)}
    merged["metadata"]["labels"] = kept | built["metadata"]["labels"]
    return merged
