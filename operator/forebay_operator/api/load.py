"""YAML text -> DisaggregatedModel, with errors that name the field, its line, its value, the limit and the remedy."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forebay_operator.api.labels import API_VERSION, KIND
from forebay_operator.api.v1alpha1 import DisaggregatedModel

MAX_BYTES = 1024 * 1024
_SERVER_SET = ("creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid")
_SHOWN_VALUE = 80

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    path: str
    """Of the field, as kubectl writes it: `spec.scaling.ratio.min`, `spec.engine.env[0].name`."""

    line: int | None
    """In the file, from 1; None where the text is not to blame."""

    message: str
    at: Path = ()
    """As `path`, step by step."""

    unknown: bool = False
    """There is no such field."""

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.path}: {self.message}" if self.path else f"{where}{self.message}"


class SpecError(ValueError):
    """What is wrong with a manifest, every problem at once."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            listed = "".join(f"\n  {problem}" for problem in self.problems)
            super().__init__(f"{source}: {len(self.problems)} problems{listed}")


@dataclass(frozen=True, slots=True)
class Manifest:
    model: DisaggregatedModel
    skipped: tuple[str, ...]
    """Kinds of the file's other documents."""


def load_manifest(text: str, source: str) -> Manifest:
    """The one DisaggregatedModel in `text`. `source` names the text in errors. Raises SpecError.

    What the API server adds (status, metadata.uid and such) is dropped: the output of `kubectl get -o yaml` loads.
    """
    size = len(text.encode())
    if size > MAX_BYTES:
        raise SpecError(source, [Problem("", None, f"is {size} bytes; at most {MAX_BYTES}")])
    try:
        loader = _Loader(text)
        nodes: list[yaml.Node] = []
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                nodes.append(node)
        documents = [(node, loader.construct_document(node)) for node in nodes]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(source, [Problem("", mark.line + 1 if mark else None, f"is not valid YAML: {what}")]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(source, [Problem("", None, f"is not valid YAML: {error}")]) from None

    ours = [(node, data) for node, data in documents if isinstance(data, dict) and data.get("kind") == KIND]
    others = tuple(
        str(data.get("kind", "?")) if isinstance(data, dict) else type(data).__name__
        for _, data in documents
        if data is not None and not (isinstance(data, dict) and data.get("kind") == KIND)
    )
    if len(ours) != 1:
        found = f"{len(ours)} of them" if ours else (f"only {', '.join(others)}" if others else "nothing")
        message = f"must hold one document with kind: {KIND} and apiVersion: {API_VERSION}; it holds {found}"
        raise SpecError(source, [Problem("", None, message)])
    root, content = ours[0]
    return Manifest(_validate(content, root, source), others)


def from_server(data: Mapping[str, Any]) -> DisaggregatedModel:
    """The model of an object that the API server gave: of its metadata only name and namespace count.

    Raises SpecError for what the CRD's schema let pass, and for objects older than the schema.
    """
    metadata = data.get("metadata", {})
    source = f"{KIND} {metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    kept = {key: metadata[key] for key in ("name", "namespace") if key in metadata}
    manifest = {**{key: data[key] for key in ("apiVersion", "kind", "spec") if key in data}, "metadata": kept}
    try:
        return DisaggregatedModel.model_validate(manifest)
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise SpecError(source, [_problem(detail, None) for detail in details])


def read_stored(data: Mapping[str, Any]) -> tuple[DisaggregatedModel, tuple[str, ...]]:
    """`from_server`, without the fields that this version does not know; their paths.

    The CRD lets only known ones in, and fills their defaults in: those that are unknown here are a later version's.
    While an upgrade is under way, or after it was taken back, the operator is older than the CRD.
    """
    try:
        return from_server(data), ()
    except SpecError as error:
        unknown = [problem.at for problem in error.problems if problem.unknown]
        if not unknown:
            raise
    kept = copy.deepcopy({**data, "spec": data.get("spec") or {}})
    for path in unknown:
        node: Any = kept
        for step in path[:-1]:
            node = node[step]
        del node[path[-1]]
    return from_server(kept), tuple(_dotted(path) for path in unknown)


def _validate(data: dict[str, Any], node: yaml.Node, source: str) -> DisaggregatedModel:
    data.pop("status", None)
    metadata = data.get("metadata")
    if isinstance(metadata, dict):
        for key in _SERVER_SET:
            metadata.pop(key, None)
    try:
        return DisaggregatedModel.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    except RecursionError:
        raise SpecError(source, [Problem("", None, "refers to itself through a YAML alias")]) from None
    raise SpecError(source, [_problem(detail, node) for detail in details])


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice; keep one", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _problem(detail: ErrorDetails, root: yaml.Node | None) -> Problem:
    path = tuple(step for step in detail["loc"] if step != "[key]")
    line = None if root is None else _line(root, path)
    return Problem(_dotted(path), line, _message(detail, path), path, detail["type"] == "extra_forbidden")


def _dotted(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _line(node: yaml.Node, path: Path) -> int:
    """Line of the field at `path`, or of the nearest field above it that the text has."""
    line: int = node.start_mark.line
    for step in path:
        child: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == step:
                    child, line = value, key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            child = node.value[step]
            line = child.start_mark.line
        if child is None:
            break
        node = child
    return line + 1


def _message(detail: ErrorDetails, path: Path) -> str:
    kind, limits, given = detail["type"], detail.get("ctx") or {}, _shown(detail["input"], path)
    if kind == "missing":
        return "is missing; add it"
    if kind == "extra_forbidden":
        known = _fields_at(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        return "is no known field; " + (f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}")
    if kind == "value_error":
        return str(limits.get("error", detail["msg"]))
    if kind == "literal_error":
        expected = str(limits.get("expected", ""))
        options = [option.strip("'") for option in expected.replace(" or ", ", ").split(", ")]
        near = [option for option in options if option.lower() == str(detail["input"]).lower()]
        return f"is {given}; must be {expected}" + (f": did you mean {near[0]}?" if near else "")
    if kind == "greater_than_equal":
        return f"is {given}; must be at least {limits['ge']}"
    if kind == "less_than_equal":
        return f"is {given}; must be at most {limits['le']}"
    if kind == "string_pattern_mismatch":
        return f"is {given}; must be {_description(path)} (pattern {limits['pattern']})"
    if kind in ("string_too_long", "string_too_short"):
        bound = f"at most {limits['max_length']}" if kind == "string_too_long" else f"at least {limits['min_length']}"
        return f"is {given}, {len(detail['input'])} characters; must have {bound}"
    if kind in ("too_long", "too_short"):
        bound = f"at most {limits['max_length']}" if kind == "too_long" else f"at least {limits['min_length']}"
        return f"has {len(detail['input'])} items; must have {bound}"
    if kind == "int_type":
        return f"is {given}; must be a whole number, not quoted and without a fraction"
    if kind == "string_type":
        return f"is {given}; must be a string: put it in quotes"
    if kind == "bool_type":
        return f"is {given}; must be true or false, not quoted"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"is {given}; must be a map of fields"
    if kind == "list_type":
        return f"is {given}; must be a list"
    return f"is {given}: {detail['msg']}"


def _shown(value: object, path: Path) -> str:
    if isinstance(value, (dict, list)):
        return "a map" if isinstance(value, dict) else "a list"
    if path and path[-1] == "value":
        return "something"  # an env value may be a secret
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 3] + "..."


def _model_at(path: Path) -> type[BaseModel] | None:
    model: type[BaseModel] = DisaggregatedModel
    for step in path:
        if isinstance(step, int):
            continue
        annotation = next((f.annotation for f in model.model_fields.values() if f.alias == step), None)
        found = _models_in(annotation)
        if not found:
            return None
        model = found[0]
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _fields_at(path: Path) -> list[str]:
    model = _model_at(path)
    return [field.alias or name for name, field in model.model_fields.items()] if model else []


def _description(path: Path) -> str:
    """What a string must be, from the words its pattern was declared with."""
    model = _model_at(path[:-1])
    if model is not None:
        schema = model.model_json_schema(by_alias=True)["properties"].get(path[-1], {})
        for part in (schema, *schema.get("anyOf", [])):
            if "pattern" in part and "description" in part:
                return str(part["description"])
    return "of the right form"
