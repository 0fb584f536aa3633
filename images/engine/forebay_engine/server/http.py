"""What every endpoint shares: bounded bodies, errors in OpenAI's shape, request ids, writes with a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web

from forebay_engine.core.handle import CoreDied
from forebay_engine.server.schema import refusal
from forebay_engine.server.state import WorkerState
from forebay_wire import headers, paths
from forebay_wire.connections import MAX_BODY_BYTES, MAX_LEG_BYTES, ConnectionLimits
from forebay_wire.errors import ApiError

log = logging.getLogger(__name__)

MAX_ROUTER_NAME = 128
JSON = "application/json"
STATE: web.AppKey[WorkerState] = web.AppKey("state", WorkerState)
LIMITS: web.AppKey[ConnectionLimits] = web.AppKey("limits", ConnectionLimits)
ID: web.RequestKey[str] = web.RequestKey("request_id", str)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Body = TypeVar("_Body", bound=msgspec.Struct)


def router_of(request: web.Request) -> str | None:
    """The router that sent a request; its name is only a key here, cut to a bounded length."""
    name = request.headers.get(headers.ROUTER)
    return name[:MAX_ROUTER_NAME] if name else None


def is_answer(request: web.Request) -> bool:
    """True for the paths whose responses carry the load."""
    return request.path.startswith("/v1/") or request.path == paths.CONTINUE


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises ApiError: 413 beyond MAX_BODY_BYTES, the rest unread (MAX_LEG_BYTES from those that know
    the secret: a leg holds more than the client sent); 408 when it comes too slowly."""
    trusted = request.app[STATE].trusts(request.headers.get(headers.AUTHORIZATION))
    limit = MAX_LEG_BYTES if trusted else MAX_BODY_BYTES
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise ApiError(415, "content-encoding is not supported; send the body as it is")
    if request.content_length is not None and request.content_length > limit:
        raise too_large(request.content_length, limit)
    seconds = request.app[LIMITS].body_seconds
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limit:
                    raise too_large(len(body), limit)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:.0f} s") from error
    return bytes(body)


def too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more, at most {limit} are read", code="body_too_large")


async def read_message(request: web.Request, kind: type[_Body]) -> _Body:
    """An internal endpoint's body (wire/messages.py)."""
    raw = await read_body(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(error, {}) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type=JSON)


def error_response(error: ApiError) -> web.Response:
    response = json_response(error.json(), error.status)
    if error.retry_after is not None:
        response.headers[headers.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after)))
    if error.status in (408, 413, 415):
        response.force_close()  # the rest of the body is still on its way
    return response


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a client that must keep reading: what waits for it is bounded, and so is the wait.

    Raises ConnectionError when the client is gone, or was cut off because it didn't read.
    """
    seconds = request.app[LIMITS].write_seconds
    try:
        async with asyncio.timeout(seconds):
            await response.write(data)  # waits once 64 KiB were written and the transport holds as much
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client read nothing for {seconds:.0f} s") from error


def _accept_id(request: web.Request) -> str:
    offered = request.headers.get(headers.REQUEST_ID)
    if offered is None:
        return uuid.uuid4().hex
    if not headers.is_request_id(offered):
        raise ApiError(
            400,
            f"{headers.REQUEST_ID}: {headers.REQUEST_ID_RULE} are allowed, got {len(offered)} characters",
            param=headers.REQUEST_ID,
        )
    return offered


@web.middleware
async def errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Outermost: every failure leaves as an OpenAI-shaped error with a request id."""
    request[ID] = "-"
    try:
        request[ID] = _accept_id(request)
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
    except CoreDied as error:
        request.app[STATE].died.set()
        return error_response(ApiError(500, f"the engine has died: {error}", code="engine_died"))
    except TimeoutError:
        return error_response(ApiError(504, f"{request.path}: no answer in time", code="timeout"))
    except ConnectionError:
        raise  # the client is gone: there is nobody to answer
    except Exception:
        log.exception("request %s: unexpected failure on %s", request[ID], request.path)
        return error_response(ApiError(500, f"internal error; the log has it under request id {request[ID]}"))


async def stamp(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: the request id and, on answers, the load at this moment."""
    response.headers[headers.REQUEST_ID] = request.get(ID, "-")
    if is_answer(request):
        report = request.app[STATE].load_report(router_of(request))
        response.headers[headers.LOAD] = msgspec.json.encode(report).decode()
