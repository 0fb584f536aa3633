"""OpenAI-shaped errors, the same from router and workers."""

from __future__ import annotations

import msgspec


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class ApiError(Exception):
    """An error that a client sees. `param` names the request's field, where one is to blame."""

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
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.body = ErrorBody(message=message, type=kind or _kind(status), param=param, code=code)

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorEnvelope(self.body))


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
