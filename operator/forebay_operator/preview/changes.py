"""What differs between an object as it is and as it would be. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Object = Mapping[str, Any]

_SHOWN: Final = 60
_LIMIT: Final = 50
_NAMED_BY: Final = ("name", "key", "containerPort", "port", "type")
"""Keys that tell the items of a list apart, as Kubernetes' own lists do."""

_SERVERS: Final = {"managedFields", "resourceVersion", "generation", "creationTimestamp", "uid", "selfLink"}


class Action(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    DELETE = "delete"
    KEEP = "keep"
    REFUSED = "refused"
    """The API server, an admission webhook or a quota would refuse it, or it belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class ObjectChange:
    action: Action
    kind: str
    name: str
    fields: tuple[str, ...] = ()
    """`path: old -> new`."""

    note: str = ""


def differences(before: Object, after: Object, *, partial: bool = False) -> tuple[str, ...]:
    """`path: old -> new` for each difference, at most 50. `partial`: fields that `after` leaves out don't count.

    What the server keeps in metadata and status is left out; Secrets' values are never shown.
    """
    secret = after.get("kind") == "Secret"
    found: list[str] = []
    for path, old, new in _walk(_said(before), _said(after), "", partial):
        if secret and path.startswith(("data", "stringData")):
            found.append(f"{path}: (changed)")
        else:
            found.append(f"{path}: {_shown(old)} -> {_shown(new)}")
    if len(found) > _LIMIT:
        found = [*found[:_LIMIT], f"and {len(found) - _LIMIT} more"]
    return tuple(found)


def _said(obj: Object) -> dict[str, Any]:
    metadata = {key: value for key, value in (obj.get("metadata") or {}).items() if key not in _SERVERS}
    return {**{key: value for key, value in obj.items() if key != "status"}, "metadata": metadata}


_ABSENT: Final = object()


def _walk(old: Any, new: Any, path: str, partial: bool) -> list[tuple[str, Any, Any]]:
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = list(new) if partial else [*old, *(key for key in new if key not in old)]
        return [
            difference
            for key in keys
            for difference in _walk(
                old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else str(key), partial
            )
        ]
    if _is_list(old) and _is_list(new):
        left, right = _by_name(old), _by_name(new)
        if left is not None and right is not None:
            names = list(right) if partial else [*left, *(name for name in right if name not in left)]
            return [
                difference
                for name in names
                for difference in _walk(left.get(name, _ABSENT), right.get(name, _ABSENT), f"{path}[{name}]", partial)
            ]
        if len(old) == len(new):
            return [
                difference
                for index, pair in enumerate(zip(old, new, strict=True))
                for difference in _walk(*pair, f"{path}[{index}]", partial)
            ]
    return [(path, old, new)]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _by_name(items: Sequence[Any]) -> dict[str, Any] | None:
    """The items by what tells them apart; None for a list of plain values or one without such a key."""
    for key in _NAMED_BY:
        if items and all(isinstance(item, Mapping) and key in item for item in items):
            named = {str(item[key]): item for item in items}
            if len(named) == len(items):
                return named
    return None


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "(none)"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
