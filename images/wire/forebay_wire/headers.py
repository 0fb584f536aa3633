"""HTTP header names used between client, router and workers (lower case, as aiohttp compares them)."""

REQUEST_ID = "x-request-id"
"""Kept from client to worker and back; the router makes one when the client sent none."""

PREFILL = "x-forebay-prefill"
"""Response: name of the worker that ran the prefill leg."""

DECODE = "x-forebay-decode"
"""Response: name of the worker reserved for decode when the response began."""

ROUTER = "x-forebay-router"
"""Request to a worker: id of the sending router; the worker counts these per router for `LoadReport.seen`."""

LOAD = "x-forebay-load"
"""Response of a worker: its `LoadReport` as compact JSON, at the time the headers were written."""

TRACEPARENT = "traceparent"
"""W3C trace context, passed on unchanged."""

AUTHORIZATION = "authorization"
RETRY_AFTER = "retry-after"
