"""The core's events of one request, for one answer or several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType

from forebay_engine.core.handle import CoreHandle
from forebay_engine.types import EngineRequest, FailEvent, TokenEvent
from forebay_wire.errors import ApiError

Event = TokenEvent | FailEvent

_QUEUED_PER_ANSWER = 4


class Generation:
    """Async iterator of (index, TokenEvent); leaving the context aborts whatever still runs.

    A FailEvent of any answer is raised as ApiError. Answers that end are left out; iteration ends with the last one.
    """

    def __init__(self, core: CoreHandle, requests: list[EngineRequest]) -> None:
        self._core = core
        self._requests = requests
        self._one: AsyncIterator[Event] | None = None
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(
            len(requests) * _QUEUED_PER_ANSWER
        )
        self._dropped: set[int] = set()

    async def __aenter__(self) -> Generation:
        if len(self._requests) == 1:
            self._one = self._core.generate(self._requests[0])
        else:
            for index, request in enumerate(self._requests):
                self._pumps[index] = asyncio.create_task(self._pump(index, request))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._one is not None:
            await _close(self._one)
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)

    async def _pump(self, index: int, request: EngineRequest) -> None:
        events = self._core.generate(request)
        try:
            async for event in events:
                await self._queue.put((index, event))
            await self._queue.put((index, None))
        except Exception as error:
            await self._queue.put((index, error))
        finally:
            await _close(events)

    def drop(self, index: int) -> None:
        """End one answer early: aborts it, and only it."""
        self._dropped.add(index)
        if index in self._pumps:
            self._pumps[index].cancel()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> tuple[int, TokenEvent]:
        while len(self._dropped) < len(self._requests):
            index, event = await self._next()
            if index in self._dropped:
                continue
            if event is None:
                self._dropped.add(index)
                continue
            if isinstance(event, FailEvent):
                raise ApiError(event.status, event.message, retry_after=event.retry_after_seconds)
            return index, event
        raise StopAsyncIteration

    async def _next(self) -> tuple[int, Event | None]:
        if self._one is not None:
            return 0, await anext(self._one, None)
        index, event = await self._queue.get()
        if isinstance(event, Exception):
            raise event
        return index, event


async def _close(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
