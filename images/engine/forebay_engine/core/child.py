"""The core process: `python -m forebay_engine.core.child FD`. Wraps a LocalCore behind the socket in FD.

Ends when the socket closes, whatever the reason: a core without its server serves nobody.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import uvloop

from forebay_engine.core import ipc
from forebay_engine.core.local import LocalCore
from forebay_engine.core.parts import make_parts
from forebay_engine.core.processes import die_with_parent, exit_now
from forebay_engine.types import Abort, EngineRequest, SetDraining
from forebay_wire.messages import LeaseRef, ProgressRequest, ReserveRequest

log = logging.getLogger(__name__)

WRITE_BUFFER_LIMIT = 64 * 1024 * 1024
"""Beyond this many unsent bytes the server is not reading any more; the core gives up rather than grow."""

CLOSE_SECONDS = 4.0
"""Less than the server gives its core (process.py): what hangs is said before it is killed."""


class Child:
    def __init__(self, core: LocalCore, writer: asyncio.StreamWriter) -> None:
        self._core = core
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitting: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, Callable[[bytes], Awaitable[Any]]] = {
            "handshake": lambda _: core.handshake(),
            "heartbeat": lambda body: core.heartbeat(msgspec.msgpack.decode(body, type=list[LeaseRef])),
            "complete": lambda body: core.complete(msgspec.msgpack.decode(body, type=LeaseRef)),
            "cancel": lambda body: core.cancel(msgspec.msgpack.decode(body, type=str)),
            "progress": lambda body: core.progress(msgspec.msgpack.decode(body, type=ProgressRequest)),
            "reserve": lambda body: core.reserve(msgspec.msgpack.decode(body, type=ReserveRequest)),
            "release": lambda body: core.release(msgspec.msgpack.decode(body, type=str)),
        }

    def send(self, message: ipc.FromCore) -> None:
        if self._writer.transport.get_write_buffer_size() > WRITE_BUFFER_LIMIT:
            log.error("the server process does not read; ending")
            exit_now(1)
        self._writer.write(ipc.frame(message))

    def handle(self, message: ipc.ToCore) -> bool:
        """False ends the process."""
        match message:
            case EngineRequest():
                self._submit(message)
            case Abort(request_id=request_id, receipt=receipt):
                # Where it has not reached the step thread yet, it must not do so after its own Abort.
                if request_id in self._submitting:
                    self._submitting[request_id].cancel()
                self._core.leave(request_id, receipt)
            case SetDraining(draining=draining):
                self._core.set_draining(draining)
            case ipc.Call():
                self._spawn(self._call(message))
            case ipc.Close():
                return False
        return True

    async def _call(self, call: ipc.Call) -> None:
        try:
            result = await self._calls[call.method](call.body)
            self.send(ipc.Reply(call.id, msgspec.msgpack.encode(result)))
        except Exception as error:
            self.send(ipc.Reply(call.id, error=f"{type(error).__name__}: {error}"))

    def _submit(self, request: EngineRequest) -> None:
        task = self._submitting[request.request_id] = self._spawn(self._core.submit(request))

        def done(_: asyncio.Task[None]) -> None:
            if self._submitting.get(request.request_id) is task:
                del self._submitting[request.request_id]

        task.add_done_callback(done)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def run(fd: int) -> int:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    first = await ipc.read_frame(reader)
    if first is None:
        return 1
    settings = ipc.parse_settings(first)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s core %(name)s %(message)s")
    core = LocalCore(lambda: make_parts(settings))
    child = Child(core, writer)
    try:
        info = await core.start()
    except Exception as error:
        log.debug("start failed", exc_info=True)
        child.send(ipc.StartFailed(type(error).__name__, str(error)))
        await writer.drain()
        return 1
    core.redirect(lambda events: child.send(ipc.Events(events)))
    core.notify(child.send, lambda death: child.send(ipc.Died(str(death))))
    child.send(ipc.Started(info))
    decode = ipc.decoder(ipc.ToCore)
    while (body := await ipc.read_frame(reader)) is not None:
        if not child.handle(decode.decode(body)):
            break
    if not await closed(core):
        exit_now(1)  # at once: the event loop's own end would wait for what hangs
    return 0


async def closed(core: LocalCore, seconds: float = CLOSE_SECONDS) -> bool:
    """Close it. False, with the reason logged, when that fails or takes longer than `seconds`: a call of NIXL's hangs,
    and who waits for it can't be cancelled, since it may still write to memory. The process must end with it.
    """
    closing = asyncio.ensure_future(core.close())
    await asyncio.wait({closing}, timeout=seconds)
    if not closing.done():
        log.error("the KV transport did not end within %g s; leaving with a call under way", seconds)
    elif (error := closing.exception()) is not None:
        log.error("the KV transport did not end in order: %s", error)
    else:
        return True
    return False


def main() -> None:
    die_with_parent()
    exit_now(uvloop.run(run(int(sys.argv[1]))))


if __name__ == "__main__":
    main()
