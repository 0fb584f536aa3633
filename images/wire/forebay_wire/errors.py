"""OpenAI-shaped errors, the same from router and workers."""

from __future__ import annotations

import json
import re

import msgspec

OVERLOADED = "overloaded"
MAX_MESSAGE = 2000
MAX_PARAM = 200
"""Characters of an error. A client's own names and values are in it, and those may be megabytes long."""

_LOOKED_THROUGH = 64 * 1024
"""Bytes of a body in which half a surrogate pair is looked for: that takes Python's own, slower decoder."""

_AT = re.compile(r" - at `.*`$")


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """An error that a client sees. `param` names the request's field, where one is to blame.

    A 429 has the code `overloaded`, whoever says so and why.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = _cut(message, MAX_MESSAGE)
        param = None if param is None else _cut(param, MAX_PARAM)
        if status == 429 and code is None:
            code = OVERLOADED
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = ErrorBody(message=message, type=kind or _kind(status), param=param, code=code)

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))


def bad_json(raw: bytes, error: Exception) -> ApiError:
    """The 400 for a body that cannot be decoded. Names the field whose value is at fault, where that can be told."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        fields = {}
        if len(raw) <= _LOOKED_THROUGH and (name := _with_lone_surrogate(raw)) is not None:
            return ApiError(400, f"{name}: half of a surrogate pair stands alone in a text", param=name)
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as cause:
            return ApiError(400, f"{_cut(name, MAX_PARAM)}: {_AT.sub('', str(cause))}", param=name)
    return ApiError(400, f"the body is not a JSON object: {error}")


def _with_lone_surrogate(raw: bytes) -> str | None:
    """The field. msgspec, which takes no lone surrogates, says of some that the body is cut short."""
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    for name, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return name if name.isprintable() else None
    return None


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
