"""The fields of a status: which are written, and which ones stay that nobody wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without maps that hold nothing. Server-side apply makes a null of one that goes from some fields to none, and the
    API server then refuses the whole status, or keeps what differs from what we write, and we write it again."""
    said = {key: filled(value) if isinstance(value, Mapping) else value for key, value in fields.items()}
    return {key: value for key, value in said.items() if value != {}}


def unwanted(held: Mapping[str, Any], wanted: Mapping[str, Any], above: str = "") -> list[str]:
    """Paths, such as `decision.inputs.bar`, of what is held and wanted otherwise or not at all."""
    found = []
    for key, value in sorted(held.items()):
        if key not in wanted:
            found.append(above + key)
        elif isinstance(value, Mapping) and isinstance(wanted[key], Mapping):
            found += unwanted(value, wanted[key], f"{above}{key}.")
        elif value != wanted[key]:
            found.append(above + key)
    return found
