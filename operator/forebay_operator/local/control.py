"""HTTP over a unix socket in the state folder of an `up`, for `forebay status`, `down` and `ratio`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from forebay_operator.api.ratio import parse_ratio
from forebay_operator.local.errors import InputError, LocalError
from forebay_operator.local.state import StateFolder, is_pid_alive
from forebay_operator.local.status import DownRequest, RatioRequest, RatioResponse, Refusal, UpStatus

if TYPE_CHECKING:  # the client side does without all that a supervisor imports
    from forebay_operator.local.supervisor import Supervisor

SOCKET = "control.sock"
_MAX_BODY = 64 * 1024
_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.1

M = TypeVar("M")


@asynccontextmanager
async def serve(supervisor: Supervisor) -> AsyncIterator[None]:
    """Answer on the control socket while the context is open. The folder's mode (0700) is what guards it."""
    app = web.Application(client_max_size=_MAX_BODY)

    async def status(_: web.Request) -> web.Response:
        return _json(supervisor.status())

    async def down(request: web.Request) -> web.Response:
        body = await _body(request, DownRequest)
        supervisor.request_down(now=body.now)
        return _json(supervisor.status())

    async def ratio(request: web.Request) -> web.Response:
        body = await _body(request, RatioRequest)
        try:
            target, switched = supervisor.switch_ratio(parse_ratio(body.ratio))
        except (ValueError, LocalError) as error:
            return _json(Refusal(str(error)), status=409)
        return _json(RatioResponse(str(target), switched))

    app.router.add_get("/status", status)
    app.router.add_post("/down", down)
    app.router.add_post("/ratio", ratio)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        with _short_path(supervisor.state) as path:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


class Control:
    """Asks a running `up`. Every method raises LocalError when it does not answer within 10 s."""

    def __init__(self, state: StateFolder) -> None:
        self._state = state

    async def status(self) -> UpStatus:
        return await self._ask("GET", "/status", None, UpStatus)

    async def down(self, *, now: bool) -> UpStatus:
        return await self._ask("POST", "/down", DownRequest(now=now), UpStatus)

    async def ratio(self, ratio: str) -> RatioResponse:
        """Raises InputError with the `up`'s reason when it refuses."""
        return await self._ask("POST", "/ratio", RatioRequest(ratio), RatioResponse)

    async def _ask(self, method: str, path: str, body: Any, answer: type[M]) -> M:
        name = self._state.name
        try:
            with _short_path(self._state) as address:
                async with (
                    aiohttp.ClientSession(
                        connector=aiohttp.UnixConnector(path=address),
                        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
                    ) as session,
                    session.request(
                        method, f"http://forebay{path}", data=None if body is None else msgspec.json.encode(body)
                    ) as response,
                ):
                    raw = await response.read()
                    if response.status == 409:
                        raise InputError(msgspec.json.decode(raw, type=Refusal).error)
                    if response.status != 200:
                        raise LocalError(f"{name} answered {method} {path} with status {response.status}")
                    return msgspec.json.decode(raw, type=answer)
        except TimeoutError:
            raise LocalError(f"{name} did not answer {method} {path} within {_TIMEOUT_SECONDS:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise LocalError(f"{name} is starting or ending, it does not answer: {error}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise LocalError(f"{name} runs another version of forebay, its answer does not parse: {error}") from None


def down(state: StateFolder, *, now: bool, timeout: float) -> None:
    """Drain (or kill) an `up` and wait until it is gone. Raises LocalError when it is not by `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pid = asyncio.run(Control(state).down(now=now)).pid
    while state.running() or is_pid_alive(pid):
        if time.monotonic() >= deadline:
            raise LocalError(
                f"{state.name} still drains after {timeout:g} s; wait for it, or end it with `forebay down --now`"
            )
        time.sleep(_POLL_SECONDS)


async def _body(request: web.Request, kind: type[M]) -> M:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise web.HTTPBadRequest(text=str(error)) from None


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


@contextmanager
def _short_path(state: StateFolder) -> Iterator[str]:
    """A path of the socket that fits the 107 bytes of a unix address, however deep the state folder lies."""
    folder = os.open(state.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)
