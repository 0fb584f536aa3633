"""The core on the current event loop: the step thread and the transfer service, joined.

A simulated worker's server uses this directly; a native worker's core process wraps it (core/child.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from forebay_engine.core.commands import (
    BlocksExpired,
    BlocksFreed,
    PullDone,
)
from forebay_engine.core.handle import CoreDied, CoreInfo, CoreStats
from forebay_engine.core.reservations import Reservations
from forebay_engine.core.step_loop import StepLoop
from forebay_engine.core.streams import Event, RequestStreams, StreamEvent, ends
from forebay_engine.scheduler import PullOrder
from forebay_engine.transfer.service import TransferService
from forebay_engine.types import Abort, AbortDone, EngineRequest, SetDraining
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


@dataclass(slots=True)
class CoreParts:
    """Everything `LocalCore` joins; made off the loop, since loading a model takes seconds."""

    info: CoreInfo
    make_loop: Callable[[LoopOutbox, TransferService], StepLoop]
    make_service: Callable[[Callable[[tuple[int, ...]], None], Callable[[tuple[int, ...]], None]], TransferService]
    close: Callable[[], None]


class LoopOutbox:
    """Carries the step thread's results to the event loop, one wake-up per step."""

    def __init__(self, core: LocalCore, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._loop = loop

    def _call(self, function: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop closed while the step thread was in its last step
            log.debug("a result came after the loop had closed")

    def events(self, events: list[StreamEvent]) -> None:
        self._call(self._core.deliver, events)

    def pulls(self, orders: list[PullOrder]) -> None:
        self._call(self._core.start_pulls, orders)

    def stats(self, stats: CoreStats) -> None:
        self._call(self._core.take_stats, stats)

    def died(self, cause: BaseException) -> None:
        self._call(self._core.fail_all, cause)


class LocalCore:
    """core/handle.py: CoreHandle."""

    def __init__(self, make_parts: Callable[[], CoreParts]) -> None:
        self._make_parts = make_parts
        self._streams = RequestStreams(self.leave)
        self._sink: Callable[[list[StreamEvent]], None] = self._streams.deliver
        self._tasks: set[asyncio.Task[None]] = set()
        self._stats = CoreStats()
        self._dead: CoreDied | None = None
        self._on_stats: Callable[[CoreStats], None] | None = None
        self._on_death: Callable[[CoreDied], None] | None = None

    async def start(self) -> CoreInfo:
        loop = asyncio.get_running_loop()
        self._parts = await loop.run_in_executor(None, self._make_parts)
        self._service = self._parts.make_service(self._blocks_freed, self._blocks_expired)
        self._steps = self._parts.make_loop(LoopOutbox(self, loop), self._service)
        self._reservations = Reservations(self._service, self._steps.send)
        await self._service.start()
        self._steps.start()
        return self._parts.info

    async def close(self) -> None:
        if not hasattr(self, "_steps"):
            return
        await self._reservations.close()
        await asyncio.get_running_loop().run_in_executor(None, self._steps.stop)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._service.stop()
        self._parts.close()

    def generate(self, request: EngineRequest) -> AsyncIterator[Event]:
        return self._streams.stream(request, lambda: self.submit(request))

    async def submit(self, request: EngineRequest) -> None:
        """Start a request; its events go to `redirect`'s sink, or to the reader of `generate`."""
        self._check()
        self._steps.send(await self._prepare(request))
        self._tell_stats()

    def redirect(self, sink: Callable[[list[StreamEvent]], None]) -> None:
        """Have every step's events handed over in one list (the core process writes them as one frame)."""
        self._sink = sink

    async def _prepare(self, request: EngineRequest) -> EngineRequest:
        """Start the heartbeats, for the lease must outlive our own queue, and settle what was pulled ahead."""
        source = request.pull
        ours = source is not None and source.engine_id == self._parts.info.engine_id
        if source is not None and not ours:
            # First: the lease's end is reckoned from now, and settling may wait for a read.
            self._service.track(source)
        await self._reservations.settle(request.request_id, source)
        if source is not None and ours:
            # The blocks are our own: give the lease back and find them again through the prefix cache.
            self._service.complete(LeaseRef(request_id=source.request_id, epoch=source.epoch))
            request.pull = None
        return request

    def abort(self, request_id: str) -> None:
        self.leave(request_id, None)

    def leave(self, request_id: str, receipt: int | None) -> None:
        """Abort; with a receipt, an AbortDone comes back as the last event."""
        if self._dead is None:
            self._steps.send(Abort(request_id, receipt))
            self._service.untrack(request_id)

    @property
    def stats(self) -> CoreStats:
        return self._steps.up_to_date(self._stats) if hasattr(self, "_steps") else self._stats

    def notify(self, on_stats: Callable[[CoreStats], None], on_death: Callable[[CoreDied], None]) -> None:
        self._on_stats = on_stats
        self._on_death = on_death

    async def handshake(self) -> Handshake:
        self._check()
        return self._service.handshake()

    async def heartbeat(self, leases: list[LeaseRef]) -> HeartbeatResponse:
        self._check()
        return self._service.heartbeat(leases)

    async def complete(self, lease: LeaseRef) -> CompleteResponse:
        self._check()
        return self._service.complete(lease)

    async def cancel(self, request_id: str) -> None:
        self._check()
        self._steps.send(Abort(request_id))

    async def progress(self, request: ProgressRequest) -> ProgressResponse:
        self._check()
        return await self._service.progress(request)

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        self._check()
        return await self._reservations.reserve(request)

    async def release(self, request_id: str) -> None:
        self._check()
        await self._reservations.release(request_id)

    def set_draining(self, draining: bool) -> None:
        if self._dead is None:
            self._steps.send(SetDraining(draining))

    # Called through LoopOutbox, on the event loop.

    def deliver(self, events: list[StreamEvent]) -> None:
        for event in events:
            if not isinstance(event, AbortDone) and ends(event):
                self._service.ended(event.request_id)
        self._sink(events)

    def start_pulls(self, orders: list[PullOrder]) -> None:
        for order in orders:
            self._spawn(self._pull(order), "pull")

    async def _pull(self, order: PullOrder) -> None:
        ok, unsettled = False, None
        try:
            result = await self._service.pull(order.source, order.remote_blocks, order.local_blocks)
            ok, unsettled = result.ok, result.unsettled
            if not ok:
                log.warning("request %s: pull failed, computing the prompt here: %s", order.request_id, result.reason)
        finally:
            self._service.untrack(order.request_id)
            self._steps.send(PullDone(order.request_id, ok, unsettled))

    def take_stats(self, stats: CoreStats) -> None:
        self._stats = stats
        self._tell_stats()

    def _tell_stats(self) -> None:
        if self._on_stats is not None:
            self._on_stats(self.stats)

    def fail_all(self, cause: BaseException) -> None:
        self._dead = CoreDied(f"the engine's step thread failed: {type(cause).__name__}: {cause}")
        self._streams.fail_all(self._dead)
        if self._on_death is not None:
            self._on_death(self._dead)

    def _blocks_freed(self, blocks: tuple[int, ...]) -> None:
        self._steps.send(BlocksFreed(blocks))

    def _blocks_expired(self, blocks: tuple[int, ...]) -> None:
        self._steps.send(BlocksExpired(blocks))

    def _check(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _spawn(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                log.error("%s failed", what, exc_info=finished.exception())

        task.add_done_callback(done)
        return task
