"""One ticker for the stall timeouts of all legs: no timer per chunk, and a suspicion shortens all of a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from forebay_router.upstream import WorkerFailed
from forebay_router.workers import Worker

TICK_SECONDS = 0.25
LATE_SECONDS = 0.5
"""A tick later than this means that it was this process that stood still: what the workers sent meanwhile is read
first, and judged with the next tick."""


class Guard:
    """Watches one leg. Its holder notes every byte (`alive`), and sets `paused` while it waits for its client."""

    __slots__ = ("_scope", "last", "limit", "paused", "stalled", "worker")

    def __init__(self, worker: Worker, limit: float, now: float) -> None:
        self.worker = worker
        self.limit = limit
        self.last = now
        self.paused = False
        self.stalled = False
        """The guard has fired."""

        self._scope: asyncio.Timeout | None = None

    def alive(self, now: float) -> None:
        self.last = now

    def silent(self, now: float, suspect_stall: float) -> bool:
        """Whether the worker has been silent for too long.

        A suspected worker's silence counts from its last sign of life anywhere: a leg that has waited long for a
        healthy worker is not given up at once when the first reports are late.
        """
        if self.paused:
            return False
        silent_since = self.worker.silent_since(now)
        if silent_since is not None and now - max(self.last, silent_since) > min(self.limit, suspect_stall):
            return True
        return now - self.last > self.limit

    def enter(self, scope: asyncio.Timeout) -> None:
        self._scope = scope

    def fire(self, now: float) -> None:
        assert self._scope is not None
        self.stalled = True
        self._scope.reschedule(now)


class Watch:
    """The scope that a guard may end."""

    __slots__ = ("_guard", "_scope", "_watchdog")

    def __init__(self, watchdog: Watchdog, guard: Guard) -> None:
        self._watchdog = watchdog
        self._guard = guard
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Guard:
        self._guard.enter(await self._scope.__aenter__())
        self._watchdog.add(self._guard)
        return self._guard

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guard = self._guard
        self._watchdog.discard(guard)
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as ended:
            silent = f"silent for {self._watchdog.silence(guard):.1f} s"
            raise WorkerFailed(guard.worker, "stalled", silent) from ended


class Watchdog:
    def __init__(self, clock: Callable[[], float], suspect_stall: float) -> None:
        self._clock = clock
        self._suspect_stall = suspect_stall
        self._guards: set[Guard] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._due = 0.0

    def watch(self, worker: Worker, limit: float) -> Watch:
        """Raises WorkerFailed("stalled") after `limit` seconds without a byte, fewer for a suspected worker."""
        return Watch(self, Guard(worker, limit, self._clock()))

    def add(self, guard: Guard) -> None:
        self._guards.add(guard)
        self._start()

    def discard(self, guard: Guard) -> None:
        self._guards.discard(guard)

    def silence(self, guard: Guard) -> float:
        """Seconds since the last byte."""
        return self._clock() - guard.last

    def _start(self) -> None:
        if self._ticker is None:
            self._due = self._clock() + TICK_SECONDS
            self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        now = self._clock()
        if now - self._due < LATE_SECONDS:
            for guard in list(self._guards):
                if not guard.stalled and guard.silent(now, self._suspect_stall):
                    guard.fire(now)
        if self._guards:
            self._start()

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
