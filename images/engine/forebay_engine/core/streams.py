"""Per-request event queues: the part of a CoreHandle that is the same on both sides of the process border."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from forebay_engine.core.handle import CoreDied
from forebay_engine.types import EngineRequest, FailEvent, TokenEvent

Event = TokenEvent | FailEvent


def ends(event: Event) -> bool:
    """True for the last event of a request."""
    return isinstance(event, FailEvent) or event.finish_reason is not None or event.hold is not None


class RequestStreams:
    """Queues are bounded by the tokens a request may still get; a reader that leaves early aborts its request."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._queues: dict[str, asyncio.Queue[Event | CoreDied]] = {}

    async def stream(self, request: EngineRequest, submit: Callable[[], Awaitable[None]]) -> AsyncIterator[Event]:
        request_id = request.request_id
        if request_id in self._queues:
            yield FailEvent(request_id, 409, f"request id {request_id!r} is running here already; use a fresh one")
            return
        events: asyncio.Queue[Event | CoreDied] = asyncio.Queue()
        self._queues[request_id] = events
        ended = False
        try:
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
            if not ended:
                self._abort(request_id)

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            waiting = self._queues.get(event.request_id)
            if waiting is not None:
                waiting.put_nowait(event)
            elif isinstance(event, TokenEvent) and (event.hold is not None or not ends(event)):
                self._abort(event.request_id)  # the reader left while this step ran

    def fail_all(self, error: CoreDied) -> None:
        for waiting in self._queues.values():
            waiting.put_nowait(error)
