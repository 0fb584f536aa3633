"""What the API server does with a custom resource before it stores it: defaults, schema, CEL. Enough of it for tests.

CEL runs in cel-python (docs/decisions/0006-crd-generator.md). The functions that Kubernetes adds to CEL and our rules
use are given to it here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import celpy
from celpy import celtypes

from forebay_operator.api.quantity import parse_bytes
from support.structural import faults_of


def _split(text: celtypes.StringType, separator: celtypes.StringType) -> celtypes.ListType:
    return celtypes.ListType([celtypes.StringType(part) for part in str(text).split(str(separator))])


def _quantity(text: celtypes.StringType) -> celtypes.IntType:
    return celtypes.IntType(parse_bytes(str(text)))


def _compare_to(left: celtypes.IntType, right: celtypes.IntType) -> celtypes.IntType:
    return celtypes.IntType((left > right) - (left < right))


FUNCTIONS = {"split": _split, "quantity": _quantity, "compareTo": _compare_to}
_ENVIRONMENT = celpy.Environment()
_PROGRAMS: dict[str, celpy.Runner] = {}


def evaluate(rule: str, value: Any) -> bool:
    """Raises celpy.CELEvalError when the rule itself fails, which the API server too takes for a refusal."""
    if rule not in _PROGRAMS:
        _PROGRAMS[rule] = _ENVIRONMENT.program(_ENVIRONMENT.compile(rule), functions=FUNCTIONS)
    result = _PROGRAMS[rule].evaluate({"self": celpy.json_to_cel(value)})
    assert isinstance(result, celtypes.BoolType), f"{rule} gives {result!r}"
    return bool(result)


def defaulted(value: Any, node: dict[str, Any]) -> Any:
    """`value` with the schema's defaults filled in, as a new value."""
    if isinstance(value, dict):
        out = {name: defaulted(child, _child(node, name)) for name, child in value.items()}
        for name, child in node.get("properties", {}).items():
            if name not in out and "default" in child:
                out[name] = defaulted(copy.deepcopy(child["default"]), child)
        return out
    if isinstance(value, list):
        return [defaulted(item, node.get("items", {})) for item in value]
    return value


def _child(node: dict[str, Any], name: str) -> dict[str, Any]:
    child: dict[str, Any] = node.get("properties", {}).get(name) or node.get("additionalProperties") or {}
    return child


def broken_rules(value: Any, node: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, message) of each rule that does not hold."""
    for rule in node.get("x-kubernetes-validations", ()):
        if not evaluate(rule["rule"], value):
            yield path, rule["message"]
    if isinstance(value, dict):
        for name, child in value.items():
            yield from broken_rules(child, _child(node, name), f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from broken_rules(item, node.get("items", {}), f"{path}[{index}]")


def admit(manifest: dict[str, Any], crd: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The object as stored, and why it is refused (empty: it is not). CEL runs only on what the schema takes."""
    node = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    stored: dict[str, Any] = defaulted(manifest, node)
    faults = list(faults_of(stored, node))
    if not faults:
        faults = [f"{path or '<root>'}: {message}" for path, message in broken_rules(stored, node)]
    return stored, faults
