"""`chat_template_kwargs`: variables that a client sets in the chat template (Qwen3's enable_thinking). As in vLLM.

The template reads those it knows; one that it does not know changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from forebay_engine.text.template import RESERVED_NAMES
from forebay_wire.errors import ApiError

FIELD = "chat_template_kwargs"
MAX_ARGUMENTS = 32
MAX_NAME_CHARACTERS = 64
MAX_BYTES = 16 * 1024
"""Of all of them as JSON."""

MAX_DEPTH = 8
MAX_INTEGER = 2**63 - 1


def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as they came, when they are within bounds. Raises ApiError 400."""
    if len(arguments) > MAX_ARGUMENTS:
        raise _refusal(FIELD, f"{len(arguments)} variables, at most {MAX_ARGUMENTS}")
    for name, value in arguments.items():
        _check_name(name)
        _check_value(value, f"{FIELD}.{name}")
    size = len(msgspec.json.encode(arguments))
    if size > MAX_BYTES:
        raise _refusal(FIELD, f"{size} bytes, at most {MAX_BYTES}")
    return dict(arguments)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS or not name.isidentifier() or not name.isascii():
        raise _refusal(
            FIELD, f"{name[:MAX_NAME_CHARACTERS]!r} is no variable's name of at most {MAX_NAME_CHARACTERS} characters"
        )
    if name in RESERVED_NAMES or name.endswith("_token"):
        raise _refusal(f"{FIELD}.{name}", "set by this server; leave it out")


def _check_value(value: object, where: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        if any(isinstance(item, int) and abs(item) > MAX_INTEGER for item in level):
            raise _refusal(where, f"an integer is beyond {MAX_INTEGER}")
        level = [inner for item in level for inner in _inner(item)]
        if not level:
            return
    raise _refusal(where, f"lists and objects in each other over {MAX_DEPTH} deep")


def _inner(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _refusal(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param)
