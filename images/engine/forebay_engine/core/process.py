"""The core in a process of its own, seen from the server: HTTP and tokenising never wait for a step."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from forebay_engine.core import ipc
from forebay_engine.core.handle import CoreDied, CoreInfo, CoreStats
from forebay_engine.core.streams import Event, RequestStreams
from forebay_engine.errors import ModelError
from forebay_engine.settings import WorkerSettings
from forebay_engine.types import Abort, EngineRequest, SetDraining
from forebay_wire.messages import (
    CompleteResponse,
    Handshake,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
    ReserveRequest,
    ReserveResponse,
)

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
"""Calls are answered by the core's event loop, which no step blocks."""

CLOSE_SECONDS = 5.0

T = TypeVar("T")


class ProcessCore:
    """core/handle.py: CoreHandle."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._stats = CoreStats()
        self._dead: CoreDied | None = None
        self._streams = RequestStreams(self._leave)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count()
        self._started: asyncio.Future[CoreInfo] | None = None

    async def start(self) -> CoreInfo:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ, OMP_NUM_THREADS=str(self._settings.threads))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forebay_engine.core.child",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
        )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(ipc.frame_settings(self._settings))
        self._started = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        return await self._started

    async def close(self) -> None:
        if self._started is None:
            return
        if self._dead is None:
            self._send(ipc.Close())
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        self._writer.close()

    def generate(self, request: EngineRequest) -> AsyncIterator[Event]:
        return self._streams.stream(request, lambda: self._submit(request))

    async def _submit(self, request: EngineRequest) -> None:
        self._check()
        self._send(request)

    def abort(self, request_id: str) -> None:
        self._leave(request_id, None)

    def _leave(self, request_id: str, receipt: int | None) -> None:
        if self._dead is None:
            self._send(Abort(request_id, receipt))

    @property
    def stats(self) -> CoreStats:
        return self._stats

    async def handshake(self) -> Handshake:
        return await self._call("handshake", None, Handshake)

    async def heartbeat(self, leases: list[LeaseRef]) -> HeartbeatResponse:
        return await self._call("heartbeat", leases, HeartbeatResponse)

    async def complete(self, lease: LeaseRef) -> CompleteResponse:
        return await self._call("complete", lease, CompleteResponse)

    async def cancel(self, request_id: str) -> None:
        await self._call("cancel", request_id, type(None))

    async def progress(self, request: ProgressRequest) -> ProgressResponse:
        return await self._call("progress", request, ProgressResponse, CALL_SECONDS + request.wait_seconds)

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        return await self._call("reserve", request, ReserveResponse)

    async def release(self, request_id: str) -> None:
        await self._call("release", request_id, type(None))

    def set_draining(self, draining: bool) -> None:
        if self._dead is None:
            self._send(SetDraining(draining))

    async def _call(self, method: str, body: Any, result: type[T], seconds: float = CALL_SECONDS) -> T:
        self._check()
        call_id = next(self._ids)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._send(ipc.Call(call_id, method, msgspec.msgpack.encode(body)))
            return msgspec.msgpack.decode(await asyncio.wait_for(answer, seconds), type=result)
        finally:
            del self._calls[call_id]

    def _send(self, message: ipc.ToCore) -> None:
        self._writer.write(ipc.frame(message))

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._started is None or not self._started.done():
            raise CoreDied("the engine core has not started yet")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decode = ipc.decoder(ipc.FromCore)
        try:
            while (body := await ipc.read_frame(reader)) is not None:
                self._take(decode.decode(body))
            code = await self._process.wait()
            self._die(CoreDied(f"the engine's core process ended with code {code}"))
        except Exception as error:
            log.exception("reading from the core failed")
            self._die(CoreDied(f"reading from the engine's core failed: {error}"))

    def _take(self, message: ipc.FromCore) -> None:
        started = self._started
        match message:
            case ipc.Events(events=events):
                self._streams.deliver(events)
            case CoreStats():
                self._stats = message
            case ipc.Reply(id=call_id, body=body, error=error):
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    if error is None:
                        answer.set_result(body)
                    else:
                        answer.set_exception(RuntimeError(f"engine core: {error}"))
            case ipc.Started(info=info):
                if started is not None and not started.done():  # whoever waited may have been told to stop
                    started.set_result(info)
            case ipc.StartFailed(kind=kind, message=text):
                if started is not None and not started.done():
                    started.set_exception(ModelError(text) if kind == "ModelError" else RuntimeError(f"{kind}: {text}"))
            case ipc.Died(message=text):
                self._die(CoreDied(text))

    def _die(self, error: CoreDied) -> None:
        if self._dead is not None:
            return
        self._dead = error
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        self._streams.fail_all(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
