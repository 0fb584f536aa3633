"""Secrets that a spec names: whether they are there, and have the key. A pod that waits for one says so in Events only.

They are asked for by name. A watch would need the right to list Secrets, which is the right to read them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay_operator.kube import SECRETS, Forbidden, Kube, NotFound
from forebay_operator.observe.types import Problem, ProblemKind

_FIELDS: Final = (
    ("spec.router.apiKeysSecretRef", ("router", "apiKeysSecretRef"), "keys"),
    ("spec.scaling.metrics.auth.bearerTokenSecretRef", ("scaling", "metrics", "auth", "bearerTokenSecretRef"), "token"),
)


_PARTS: Final = ("prefill", "decode", "router")


@dataclass(frozen=True, slots=True)
class SecretReference:
    field: str
    name: str
    key: str
    """Empty: any will do."""


def references(spec: Mapping[str, Any]) -> tuple[SecretReference, ...]:
    """`spec` as the API server gave it, which may be one that no model can be made of."""
    found: list[SecretReference] = []
    for field, path, key in _FIELDS:
        node: Any = spec
        for step in path:
            node = node.get(step) if isinstance(node, Mapping) else None
        if isinstance(node, Mapping) and isinstance(node.get("name"), str):
            found.append(SecretReference(field, node["name"], str(node.get("key") or key)))
    for part in _PARTS:
        found += _mounted(f"spec.{part}.podTemplate", spec, part, "podTemplate", "spec", "volumes")
    # A pool may name the other's.
    return tuple({(each.name, each.key): each for each in reversed(found)}.values())[::-1]


def _mounted(field: str, node: Any, *path: str) -> list[SecretReference]:
    """Of a pod template's volumes, those that no pod starts without."""
    for step in path:
        node = node.get(step) if isinstance(node, Mapping) else None
    volumes = [volume for volume in node if isinstance(volume, Mapping)] if isinstance(node, list) else []
    named: list[tuple[Any, str]] = [(volume.get("secret"), "secretName") for volume in volumes]
    for volume in volumes:
        projected = volume.get("projected")
        sources = projected.get("sources") if isinstance(projected, Mapping) else None
        for source in sources if isinstance(sources, list) else []:
            named.append((source.get("secret") if isinstance(source, Mapping) else None, "name"))
    return [
        SecretReference(field, held[key], "")
        for held, key in named
        if isinstance(held, Mapping) and isinstance(held.get(key), str) and not held.get("optional")
    ]


async def missing(kube: Kube, namespace: str, wanted: Sequence[SecretReference]) -> tuple[Problem, ...]:
    """Raises ApiError. No value of a Secret is kept or shown."""
    checked = await asyncio.gather(*(_check(kube, namespace, reference) for reference in wanted))
    return tuple(problem for problem in checked if problem is not None)


async def _check(kube: Kube, namespace: str, reference: SecretReference) -> Problem | None:
    where = f"Secret {namespace}/{reference.name}"
    try:
        held = await kube.get(SECRETS, namespace, reference.name)
    except NotFound:
        return Problem(ProblemKind.MISSING_OBJECT, where, f"it is not there, and {reference.field} names it")
    except Forbidden:
        # Whoever gave the operator fewer rights has the pods' own Events.
        return None
    if reference.key and reference.key not in (held.get("data") or {}):
        text = f"it has no key {reference.key}, which {reference.field} names"
        return Problem(ProblemKind.MISSING_OBJECT, where, text)
    return None
