"""The base of all API models, and the bounded strings, numbers and maps that they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

from forebay_operator.api.quantity import parse_bytes
from forebay_operator.api.ratio import parse_ratio
from forebay_operator.api.rule import Rule
from forebay_operator.api.source import parse_source

INT32_MAX: Final = 2**31 - 1
DIRECTIVE: Final = "$patch"
"""Key of a map in a podTemplate: `delete` removes what the map stands over, `replace` puts the map in its place.

As in Kubernetes' strategic merge. null alone would not do: client-side `kubectl apply` keeps nulls for itself.
"""

_JSON_LIMIT = 32 * 1024

T = TypeVar("T")


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        parse(text)
        return text

    return check


def _plain_json(value: T) -> T:
    def walk(node: Any, path: str) -> None:
        if isinstance(node, float):
            raise ValueError(f"{path or 'value'} is the float {node}; write it as an integer, or quoted as a string")
        if isinstance(node, dict):
            for key, child in node.items():
                if not isinstance(key, str):
                    raise ValueError(f"{path or 'value'} has the key {key!r}, which is no string; quote it")
                walk(child, f"{path}.{key}".lstrip("."))
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, f"{path}[{index}]")
        elif node is not None and not isinstance(node, (str, int)):
            raise ValueError(f"{path or 'value'} is a {type(node).__name__}, which JSON does not have; quote it")

    walk(value, "")
    size = len(json.dumps(value))
    if size > _JSON_LIMIT:
        raise ValueError(f"is {size} bytes as JSON; at most {_JSON_LIMIT}")
    return value


def _directives(node: Any) -> None:
    if isinstance(node, dict):
        if node.get(DIRECTIVE, "delete") not in ("delete", "replace"):
            raise ValueError(f"{DIRECTIVE} is {node[DIRECTIVE]!r}; must be delete or replace")
        for child in node.values():
            _directives(child)
    elif isinstance(node, list):
        for child in node:
            _directives(child)


def _pod_template(value: dict[str, Any]) -> dict[str, Any]:
    for key, part in value.items():
        if key not in ("metadata", "spec"):
            raise ValueError(f"{key} is no part of a pod template; write metadata and spec")
        if not isinstance(part, dict):
            raise ValueError(f"{key} must be a map of fields")
        if DIRECTIVE in part:
            raise ValueError(f"{key} can't be removed or replaced whole; remove parts of it")
    for key in ("labels", "annotations"):
        if not isinstance(value.get("metadata", {}).get(key, {}), dict):
            raise ValueError(f"metadata.{key} must be a map of strings")
    _directives(value)
    containers = value.get("spec", {}).get("containers", [{"name": ""}])
    if not isinstance(containers, list) or not all(isinstance(c, dict) and "name" in c for c in containers):
        raise ValueError("spec.containers must be a list of containers with names: they are merged by name")
    return value


def schema(**extra: Any) -> Any:
    """Field that adds keys to the CRD's schema and validates nothing by itself."""
    return Field(json_schema_extra=extra)


_OPEN_MAP: dict[str, Any] = {"type": "object", "maxProperties": 64, "x-kubernetes-preserve-unknown-fields": True}

Quantity = Annotated[
    str,
    Field(min_length=1, max_length=24),
    AfterValidator(_checked(parse_bytes)),
    schema(pattern=r"^[0-9]{1,18}(\.[0-9]{1,3})?(Ki|Mi|Gi|Ti|k|M|G|T)?$"),
]
RatioText = Annotated[
    str,
    Field(min_length=3, max_length=7),
    AfterValidator(_checked(parse_ratio)),
    schema(pattern=r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$"),
]
SOURCE_RULE: Final = Rule(
    "!self.split('/').exists(part, part == '..')",
    "must not leave its folder: remove '..' from the path",
)
Source = Annotated[
    str,
    Field(min_length=1, max_length=512),
    AfterValidator(_checked(parse_source)),
    schema(
        **{
            "pattern": (
                r"^(pvc://[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?(/.*)?|image://[A-Za-z0-9][-A-Za-z0-9._/:@]*"
                r"|hostpath:///.*|cache://[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)$"
            ),
            "x-kubernetes-validations": [SOURCE_RULE.entry()],
        }
    ),
]
JsonObject = Annotated[
    dict[str, Any], Field(max_length=64), AfterValidator(_plain_json), WithJsonSchema(_OPEN_MAP, mode="validation")
]
"""A part of the Kubernetes API passed on as it is."""

PodTemplate = Annotated[
    dict[str, Any],
    Field(max_length=64),
    AfterValidator(_plain_json),
    AfterValidator(_pod_template),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "metadata": _OPEN_MAP,
                "spec": {
                    **_OPEN_MAP,
                    "properties": {
                        "containers": {
                            "type": "array",
                            "maxItems": 32,
                            "x-kubernetes-list-type": "map",
                            "x-kubernetes-list-map-keys": ["name"],
                            "items": {
                                **_OPEN_MAP,
                                "required": ["name"],
                                "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 63}},
                            },
                        }
                    },
                },
            },
        },
        mode="validation",
    ),
]

DnsLabel = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", description="a DNS label")
]
Namespace = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", description="a namespace")
]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", description="an object's name"),
]
ResourceName = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[a-z0-9]([-a-z0-9./]*[a-z0-9])?$", description="a resource name"),
]
LabelText = Annotated[str, Field(max_length=253)]
LabelMap = Annotated[dict[LabelText, LabelText], Field(max_length=32), schema(**{"x-kubernetes-map-type": "atomic"})]
"""A selector: replaced whole, for half of one selects something else."""

Image = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\s]+$", description="an image reference")]
Replicas = Annotated[int, Field(ge=1, le=512)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
SecretKey = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="a key of a Secret")
]


class Strict(BaseModel):
    """Frozen; unknown fields, floats for integers and quoted numbers are refused."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """What the API server checks across the fields of this object."""


def plain(part: BaseModel | None) -> Any:
    """A part of the spec as the user wrote it, for passing on to Kubernetes: defaults of ours are not added."""
    return None if part is None else part.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
