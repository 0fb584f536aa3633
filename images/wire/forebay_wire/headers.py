"""HTTP headers used between client, router and workers: names (lower case, as aiohttp compares them) and values."""

from __future__ import annotations

import re

REQUEST_ID = "x-request-id"
"""Kept from client to worker and back; the router makes one when the client sent none."""

LEG = "x-forebay-leg"
"""Request to a worker: the request id with a suffix that no other request has, at any router. Leases and slots go by
it, since a client may repeat its id. Without it they go by the request id."""

PREFILL = "x-forebay-prefill"
"""Response: name of the worker that ran the prefill leg."""

DECODE = "x-forebay-decode"
"""Response: name of the worker reserved for decode when the response began."""

ROUTER = "x-forebay-router"
"""Request to a worker: id of the sending router; the worker counts these per router for `LoadReport.seen`."""

STEP_SECONDS = "x-forebay-step-seconds"
"""Request to a worker: the longest step that this answer's tokens should wait for. Prompts beside it get chunks to
match."""

WAIT_SECONDS = "x-forebay-wait-seconds"
"""Request to a worker: refuse it with 429 and Retry-After when its prompt would be computed later than this."""

LOAD = "x-forebay-load"
"""Response of a worker: its `LoadReport` as compact JSON, at the time the headers were written."""

TRACEPARENT = "traceparent"
"""W3C trace context, passed on unchanged."""

AUTHORIZATION = "authorization"
RETRY_AFTER = "retry-after"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
REQUEST_ID_RULE = "1 to 128 letters, digits or . _ : -"


def is_request_id(text: str) -> bool:
    """Whether an id is harmless in headers, logs and file names."""
    return _REQUEST_ID.fullmatch(text) is not None


def bearer(authorization: str | None) -> bytes | None:
    """The token of an Authorization header; None when it holds no bearer."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else None
