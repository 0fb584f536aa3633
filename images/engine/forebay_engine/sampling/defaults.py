"""Sampling values that the model's makers recommend: generation_config.json, used where a request names none.

The same fields as vLLM's `--generation-config auto`. `do_sample` is left alone, as there: a client that wants greedy
answers sends temperature 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay_engine.errors import ModelError
from forebay_engine.json_file import read_object


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Ranges are those of a request's own fields (server/schema.py)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0


_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
}
_ABOVE_LEAST = frozenset({"top_p", "repetition_penalty"})
"""Their least value is not allowed itself."""


def read_defaults(folder: Path) -> SamplingDefaults:
    """What the folder recommends; nothing is recommended where the file or a field is missing or null.

    Raises ModelError for a value that no request may have.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return SamplingDefaults()
    found = read_object(file)
    named = {name: _value(file, name, found[name]) for name in _RANGES if found.get(name) is not None}
    if "top_k" in named:
        named["top_k"] = max(int(named["top_k"]), 0)
    changes: dict[str, Any] = named
    return replace(SamplingDefaults(), **changes)


def _value(file: Path, name: str, value: object) -> float:
    least, most = _RANGES[name]
    number = isinstance(value, int if name == "top_k" else (int, float)) and not isinstance(value, bool)
    if not number or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelError(f"{file}: {name} is {value!r}, expected {'an integer' if name == 'top_k' else 'a number'}")
    if not least <= value <= most or (name in _ABOVE_LEAST and value == least):
        above = "above" if name in _ABOVE_LEAST else "from"
        raise ModelError(f"{file}: {name} is {value}, expected {above} {least:g} to {most:g}")
    return value
