"""A linter for CRD schemas: what the API server refuses, silently drops, or can't bound the cost of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import re2

_KNOWN = {
    "type",
    "format",
    "description",
    "default",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "properties",
    "additionalProperties",
    "items",
}
_EXTENSIONS = {
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-map-type",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}
_TYPES = {"object", "array", "string", "integer", "boolean"}


def lint(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """One line a fault. `type: number` is a fault too: specs hold no floats."""
    for key in sorted(set(node) - _KNOWN - _EXTENSIONS):
        yield f"{path}: {key} is not structural, or is dropped in silence"
    kind = node.get("type")
    if kind not in _TYPES:
        yield f"{path}: type {kind!r}"
        return
    if "default" in node:
        if node["default"] is None:
            yield f"{path}: default null"
        else:
            yield from (f"{path}: default: {fault}" for fault in faults_of(node["default"], node))
    for rule in node.get("x-kubernetes-validations", ()):
        if set(rule) - {"rule", "message", "messageExpression", "reason", "fieldPath", "optionalOldSelf"}:
            yield f"{path}: unknown keys in rule {rule}"
        if not rule.get("message") or "\n" in rule.get("message", "") or len(rule["message"]) > 2048:
            yield f"{path}: rule without a one-line message: {rule}"
    yield from {"object": _object, "array": _array, "string": _string, "integer": _integer, "boolean": _boolean}[kind](
        node, path
    )


def _object(node: dict[str, Any], path: str) -> Iterator[str]:
    open_ = node.get("x-kubernetes-preserve-unknown-fields", False)
    properties = node.get("properties")
    if "additionalProperties" in node:
        if properties is not None or open_:
            yield f"{path}: additionalProperties beside properties or preserve-unknown-fields"
        elif not isinstance(node["additionalProperties"], dict):
            yield f"{path}: additionalProperties must be a schema"
        else:
            yield from lint(node["additionalProperties"], f"{path}[*]")
        if "maxProperties" not in node:
            yield f"{path}: a map without maxProperties"
    elif properties is None and not open_ and path != ".metadata":
        yield f"{path}: an object that keeps nothing"
    if open_ and "maxProperties" not in node:
        yield f"{path}: an open map without maxProperties"
    for name in node.get("required", ()):
        if name not in (properties or {}):
            yield f"{path}: requires {name}, which it does not have"
        elif "default" in properties[name]:
            yield f"{path}: requires {name}, which has a default"
    for name, child in (properties or {}).items():
        yield from lint(child, f"{path}.{name}")


def _array(node: dict[str, Any], path: str) -> Iterator[str]:
    if "items" not in node:
        yield f"{path}: a list without items"
        return
    if "maxItems" not in node:
        yield f"{path}: a list without maxItems"
    kind, items = node.get("x-kubernetes-list-type"), node["items"]
    if kind not in ("atomic", "set", "map"):
        yield f"{path}: list type {kind!r}"
    if kind == "map":
        keys = node.get("x-kubernetes-list-map-keys") or []
        if not keys:
            yield f"{path}: a list map without keys"
        for key in keys:
            child = items.get("properties", {}).get(key)
            if child is None or child["type"] == "object":
                yield f"{path}: list map key {key} is no scalar of its items"
            elif key not in items.get("required", ()) and "default" not in child:
                yield f"{path}: list map key {key} is neither required nor defaulted"
    if kind == "set" and items["type"] in ("object", "array"):
        yield f"{path}: a set of {items['type']}s"
    yield from lint(items, f"{path}[]")


def _string(node: dict[str, Any], path: str) -> Iterator[str]:
    if not ({"maxLength", "enum"} & set(node) or node.get("format") == "date-time") and path not in (
        ".apiVersion",
        ".kind",
    ):
        yield f"{path}: a string without maxLength"
    if "pattern" in node:
        try:
            re2.compile(node["pattern"])
        except re2.error as error:
            yield f"{path}: pattern {node['pattern']!r} is not RE2: {error}"


def _integer(node: dict[str, Any], path: str) -> Iterator[str]:
    if "enum" in node:
        return
    for bound in ("minimum", "maximum"):
        if not isinstance(node.get(bound), int):
            yield f"{path}: an integer without {bound}"
    if node.get("format") not in ("int32", "int64"):
        yield f"{path}: integer format {node.get('format')!r}"


def _boolean(node: dict[str, Any], path: str) -> Iterator[str]:
    yield from ()


def faults_of(value: Any, node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Why `value` is refused by the schema: what the API server's OpenAPI validation says, without CEL.

    Unknown fields are faults, as with fieldValidation=Strict.
    """
    kind = node["type"]
    python: Any = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}[kind]
    if not isinstance(value, python) or (kind == "integer" and isinstance(value, bool)):
        yield f"{path}: must be of type {kind}"
        return
    if "enum" in node and value not in node["enum"]:
        yield f"{path}: unsupported value {value!r}"
    if kind == "integer":
        if value < node.get("minimum", value):
            yield f"{path}: must be at least {node['minimum']}"
        if value > node.get("maximum", value):
            yield f"{path}: must be at most {node['maximum']}"
    if kind == "string":
        if not node.get("minLength", 0) <= len(value) <= node.get("maxLength", len(value)):
            yield f"{path}: length {len(value)}"
        if "pattern" in node and re2.search(node["pattern"], value) is None:
            yield f"{path}: does not match {node['pattern']}"
    if kind == "array":
        if len(value) > node.get("maxItems", len(value)):
            yield f"{path}: has more than {node['maxItems']} items"
        keys = node.get("x-kubernetes-list-map-keys", ())
        seen = [tuple(item.get(key) for key in keys) for item in value if isinstance(item, dict)] if keys else []
        if len(seen) != len(set(seen)):
            yield f"{path}: duplicate value"
        for index, item in enumerate(value):
            yield from faults_of(item, node["items"], f"{path}[{index}]")
    if kind == "object":
        if len(value) > node.get("maxProperties", len(value)):
            yield f"{path}: has more than {node['maxProperties']} properties"
        for name in node.get("required", ()):
            if name not in value:
                yield f"{path}.{name}: required value"
        for name, child in value.items():
            if name in node.get("properties", {}):
                yield from faults_of(child, node["properties"][name], f"{path}.{name}")
            elif "additionalProperties" in node:
                yield from faults_of(child, node["additionalProperties"], f"{path}[{name}]")
            elif not node.get("x-kubernetes-preserve-unknown-fields") and path != ".metadata":
                yield f"{path}.{name}: unknown field"
