"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forebay_engine.errors import ModelError


def read_object(file: Path) -> dict[str, Any]:
    """The file's one JSON object. Raises ModelError naming the file: missing, unreadable, not JSON, not an object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing: is {file.parent} a model folder in Hugging Face layout?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"reading {file} failed: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object")
    return value
