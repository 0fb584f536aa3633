"""The endpoints for routers and other workers (wire/paths.py). All need the per-model bearer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from forebay_engine.core.handle import CoreHandle
from forebay_engine.server.http import STATE, json_response, read_message, router_of, write
from forebay_engine.server.state import WorkerState
from forebay_wire import headers, paths
from forebay_wire.load import PUSH_INTERVAL_SECONDS
from forebay_wire.messages import (
    CancelRequest,
    DrainRequest,
    DrainResponse,
    HeartbeatRequest,
    LeaseRef,
    ProgressRequest,
    ReserveRequest,
    ReserveResponse,
)

MAX_PROGRESS_WAIT_SECONDS = 30.0
CALL_SECONDS = 10.0
"""The core's answer to any of these comes from its loop, not from a step: later than this it is wedged."""

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Message = TypeVar("_Message", bound=msgspec.Struct)


def _authorized(request: web.Request) -> WorkerState:
    state = request.app[STATE]
    state.authorize(request.headers.get(headers.AUTHORIZATION))
    return state


def _loaded(request: web.Request) -> WorkerState:
    state = _authorized(request)
    state.loaded()
    return state


def _call(kind: type[_Message], ask: Callable[[CoreHandle, _Message], Awaitable[msgspec.Struct | None]]) -> _Handler:
    """An endpoint that hands its message to the loaded core; the answer is the core's, or {} where it has none."""

    async def handler(request: web.Request) -> web.Response:
        state = _loaded(request)
        message = await read_message(request, kind)
        async with asyncio.timeout(CALL_SECONDS):
            answer = await ask(state.core, message)
        return json_response(b"{}" if answer is None else _encode(answer))

    return handler


async def handshake(request: web.Request) -> web.Response:
    state = _loaded(request)
    async with asyncio.timeout(CALL_SECONDS):
        return json_response(_encode(await state.core.handshake()))


async def progress(request: web.Request) -> web.Response:
    state = _loaded(request)
    message = await read_message(request, ProgressRequest)
    message.wait_seconds = min(max(message.wait_seconds, 0.0), MAX_PROGRESS_WAIT_SECONDS)
    async with asyncio.timeout(message.wait_seconds + CALL_SECONDS):
        return json_response(_encode(await state.core.progress(message)))


async def reserve(request: web.Request) -> web.Response:
    state = _authorized(request)
    message = await read_message(request, ReserveRequest)
    if state.unready is not None:
        answer = ReserveResponse(admitted=False, reason=state.unready, retry_after_seconds=1.0)
        return json_response(_encode(answer))
    async with asyncio.timeout(CALL_SECONDS):
        return json_response(_encode(await state.core.reserve(message)))


async def drain(request: web.Request) -> web.Response:
    """POST /drain: stop (or take up again) serving new requests; what runs is finished, or handed on."""
    state = _authorized(request)
    message = await read_message(request, DrainRequest)
    state.set_draining(message.draining)
    if message.draining and message.move and (moved := state.hand_on()):
        log.info("draining: %d requests are handed on to other workers", moved)
    answer = DrainResponse(state.draining, state.in_flight, state.core.stats.held_blocks)
    return json_response(_encode(answer))


async def load(request: web.Request) -> web.StreamResponse:
    """GET /internal/load: a report a line, at once and then every PUSH_INTERVAL_SECONDS, until the reader leaves."""
    state = _authorized(request)
    router = router_of(request)
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: "application/x-ndjson", hdrs.CACHE_CONTROL: "no-cache"})
    await response.prepare(request)
    cursor = 0
    while not state.closing.is_set():
        line, cursor = state.load_line(router, cursor)
        await write(request, response, line + b"\n")
        await asyncio.sleep(PUSH_INTERVAL_SECONDS)
    await response.write_eof()
    return response


ROUTES: tuple[tuple[str, str, _Handler], ...] = (
    ("GET", paths.HANDSHAKE, handshake),
    ("POST", paths.LEASE_HEARTBEAT, _call(HeartbeatRequest, lambda core, message: core.heartbeat(message.leases))),
    ("POST", paths.LEASE_COMPLETE, _call(LeaseRef, lambda core, lease: core.complete(lease))),
    ("POST", paths.LEASE_CANCEL, _call(CancelRequest, lambda core, message: core.cancel(message.request_id))),
    ("POST", paths.LEASE_PROGRESS, progress),
    ("POST", paths.RESERVE, reserve),
    ("POST", paths.RELEASE, _call(CancelRequest, lambda core, message: core.release(message.request_id))),
    ("POST", paths.DRAIN, drain),
    ("GET", paths.LOAD_STREAM, load),
)
