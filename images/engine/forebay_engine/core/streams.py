"""Per-request event queues: the part of a CoreHandle that is the same on both sides of the process border."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from forebay_engine.core.handle import CoreDied
from forebay_engine.types import AbortDone, EngineRequest, FailEvent, TokenEvent

Event = TokenEvent | FailEvent
StreamEvent = Event | AbortDone

LEAVE_SECONDS = 10.0
"""An abort is answered between two steps; a request that comes again under the id of one just aborted waits for it."""


def ends(event: Event) -> bool:
    """True for the last event of a request."""
    return isinstance(event, FailEvent) or event.finish_reason is not None or event.hold is not None


@dataclass(slots=True)
class _Leaving:
    """A request whose reader left. Events of its last steps may still be on their way."""

    receipt: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class RequestStreams:
    """Queues are bounded by the tokens a request may still get; a reader that leaves early aborts its request.

    A client that tries again keeps its request id, so an id may come back while its last life is being aborted: it
    waits for the AbortDone, or it would be given the tokens of that life.
    """

    def __init__(self, abort: Callable[[str, int | None], None]) -> None:
        self._abort = abort
        self._queues: dict[str, asyncio.Queue[Event | CoreDied]] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._receipts = itertools.count()
        self._dead = False

    async def stream(self, request: EngineRequest, submit: Callable[[], Awaitable[None]]) -> AsyncIterator[Event]:
        request_id = request.request_id
        if request_id in self._queues:
            yield FailEvent(request_id, 409, f"request id {request_id!r} is running here already; use a fresh one")
            return
        events: asyncio.Queue[Event | CoreDied] = asyncio.Queue()
        self._queues[request_id] = events
        submitted = ended = False
        try:
            if not await self._free(request_id):
                yield FailEvent(request_id, 409, f"request id {request_id!r} is being aborted here; use a fresh one")
                return
            submitted = True
            await submit()
            while not ended:
                event = await events.get()
                if isinstance(event, CoreDied):
                    ended = True
                    raise event
                ended = ends(event)
                yield event
        finally:
            del self._queues[request_id]
            if submitted and not ended:
                self._leave(request_id)

    async def _free(self, request_id: str) -> bool:
        """Wait until an earlier request of that id is gone; False when it does not go."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            return True
        try:
            await asyncio.wait_for(leaving.done.wait(), LEAVE_SECONDS)
        except TimeoutError:
            return False
        return True

    def _leave(self, request_id: str) -> None:
        receipt = next(self._receipts)
        if not self._dead:
            self._leaving[request_id] = _Leaving(receipt)
        self._abort(request_id, receipt)

    def deliver(self, events: list[StreamEvent]) -> None:
        for event in events:
            leaving = self._leaving.get(event.request_id)
            if isinstance(event, AbortDone):
                if leaving is not None and leaving.receipt == event.receipt:
                    del self._leaving[event.request_id]
                    leaving.done.set()
            elif leaving is None and (waiting := self._queues.get(event.request_id)) is not None:
                waiting.put_nowait(event)

    def fail_all(self, error: CoreDied) -> None:
        self._dead = True
        for waiting in self._queues.values():
            waiting.put_nowait(error)
        for leaving in self._leaving.values():
            leaving.done.set()
        self._leaving.clear()
