"""The CustomResourceDefinition, made from the pydantic models. `make generate` writes it to crds/ and into the chart.

pydantic's JSON schema is not what the API server takes: a structural schema knows no $ref, no null type and no const,
wants a type on every node, and drops or refuses the rest (notes in docs/decisions/0006-crd-generator.md). This module
rewrites it node by node; tests/operator/api holds a linter for the result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from forebay_operator.api import labels
from forebay_operator.api.rule import Rule
from forebay_operator.api.status import DisaggregatedModelStatus
from forebay_operator.api.v1alpha1 import DisaggregatedModel, DisaggregatedModelSpec

PLURAL = "disaggregatedmodels"
NAME = f"{PLURAL}.{labels.GROUP}"

_COPIED = (
    "format",
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
)

_COLUMNS = (
    ("Model", "string", ".spec.model.servedName", 0),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Prefill", "string", ".status.prefill.summary", 0),
    ("Decode", "string", ".status.decode.summary", 0),
    ("Ratio", "string", ".status.ratio", 0),
    ("TTFT-P95", "integer", ".status.latency.timeToFirstTokenP95Milliseconds", 0),
    ("TPOT-P95", "integer", ".status.latency.timePerOutputTokenP95Milliseconds", 0),
    ("Transport", "string", ".status.transport.inUse", 1),
    ("Endpoint", "string", ".status.endpoint", 1),
    ("Summary", "string", ".status.summary", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def custom_resource_definition() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": labels.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": labels.KIND,
                "listKind": f"{labels.KIND}List",
                "plural": PLURAL,
                "singular": labels.KIND.lower(),
                "shortNames": ["dm"],
                "categories": ["forebay"],
            },
            "versions": [
                {
                    "name": labels.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": name, "type": type_, "jsonPath": path, "priority": priority}
                        for name, type_, path, priority in _COLUMNS
                    ],
                }
            ],
        },
    }


def _root() -> dict[str, Any]:
    status = structural(DisaggregatedModelStatus, defaults=False)
    # kstatus holds an object without this for current before the operator has so much as seen it.
    status["default"] = {"observedGeneration": -1}
    return {
        "type": "object",
        "description": "A large language model served with prefill and decode in separate pools of workers.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(DisaggregatedModelSpec),
            "status": status,
        },
        "x-kubernetes-validations": [rule.entry() for rule in DisaggregatedModel.rules],
    }


def structural(model: type[BaseModel], *, defaults: bool = True) -> dict[str, Any]:
    """The structural schema of a model and all below it.

    Without `defaults` for what one writer writes whole: a field that the API server filled in would look like a change.
    Raises ValueError, with the path, for what no structural schema can say.
    """
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _Rewriter(source.get("$defs", {}), dict(_models(model)), defaults).rewrite(source, model.__name__)


class _Rewriter:
    def __init__(self, definitions: dict[str, Any], models: dict[str, type[BaseModel]], defaults: bool) -> None:
        self._defaults = defaults
        self._definitions = definitions
        self._models = models

    def rewrite(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        node, default = self._resolve(node, path)
        out = self._typed(node, path)
        # Fields of plain types have titles too, made of their names.
        model = self._models.get(node.get("title", "")) if "properties" in out else None
        if text := " ".join(node.get("description", "").split()):
            out["description"] = text.replace("None:", "Left out:")
        if default is not None and self._defaults:
            out["default"] = _whole(out) if "properties" in out else default
        for key, value in node.items():
            if key in _COPIED or key.startswith("x-kubernetes-"):
                out.setdefault(key, value)
        if rules := _rules(model):
            out["x-kubernetes-validations"] = [rule.entry() for rule in rules]
        return out

    def _resolve(self, node: dict[str, Any], path: str) -> tuple[dict[str, Any], Any]:
        """The node itself, behind references and `X | None`, and the default given on the way to it."""
        default = None
        description = None
        while True:
            default = node.get("default", default)
            description = description or node.get("description")
            if "$ref" in node:
                node = {**self._definitions[node["$ref"].rsplit("/", 1)[1]], **_annotations(node)}
            elif "anyOf" in node:
                options = [option for option in node["anyOf"] if option.get("type") != "null"]
                if len(options) != 1:
                    raise ValueError(f"{path}: a union of {len(options)} types has no structural schema")
                node = {**options[0], **_annotations(node)}
            else:
                return ({**node, "description": description} if description else node), default

    def _typed(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        values = node.get("enum", [node["const"]] if "const" in node else None)
        kind = node.get("type")
        if values is not None:
            return {"type": "integer" if isinstance(values[0], int) else "string", "enum": values}
        if kind == "object":
            return self._object(node, path)
        if kind == "array":
            items = self.rewrite(node["items"], f"{path}[]")
            return {
                "type": "array",
                "items": items,
                "x-kubernetes-list-type": node.get("x-kubernetes-list-type", "atomic"),
            }
        if kind in ("string", "boolean"):
            return {"type": kind}
        if kind == "integer":
            limit = max(abs(node.get("minimum", 0)), abs(node.get("maximum", 2**63 - 1)))
            return {"type": "integer", "format": "int32" if limit < 2**31 else "int64"}
        raise ValueError(f"{path}: type {kind!r} has no structural schema")

    def _object(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "object"}
        if "properties" in node:
            out["properties"] = {
                name: self.rewrite(child, f"{path}.{name}") for name, child in node["properties"].items()
            }
        elif isinstance(node.get("additionalProperties"), dict):
            values = self.rewrite(node["additionalProperties"], f"{path}[*]")
            out["additionalProperties"] = values
        return out


def _whole(node: dict[str, Any]) -> dict[str, Any]:
    """Default of an object that may be left out: all its fields' defaults.

    {} would do for what is stored, but the API server tries the object's CEL rules on the default as it is written.
    """
    return {name: child["default"] for name, child in node["properties"].items() if "default" in child}


def _annotations(node: dict[str, Any]) -> dict[str, Any]:
    """What a reference or union says beside its target, and what outlives its resolution."""
    return {key: value for key, value in node.items() if key.startswith("x-kubernetes-") or key == "pattern"}


def _rules(model: type[BaseModel] | None) -> tuple[Rule, ...]:
    rules: tuple[Rule, ...] = getattr(model, "rules", ()) if model is not None else ()
    return rules


def _models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield model.__name__, model
    for field in model.model_fields.values():
        yield from _models_in(field.annotation)


def _models_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _models(annotation)
    for part in get_args(annotation):
        yield from _models_in(part)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def render() -> str:
    """The CRD as YAML, as it is checked in."""
    header = "# Generated from operator/forebay_operator/api by `make generate`. Do not edit.\n"
    body = yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return header + body


if __name__ == "__main__":
    sys.stdout.write(render())
