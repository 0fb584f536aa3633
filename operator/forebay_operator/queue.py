"""Work queue of keys: each is reconciled by one worker at a time, soon after it was asked for, later when it fails.

It holds keys only. An event says that something changed, never what: the reconcile reads that for itself. The number of
waiting entries is bounded by the number of keys there are.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits after failures: `first` seconds, doubled with each further failure, never more than `limit`.

    Half of a wait is random, so that keys which failed together do not come back together.
    """

    first: float = 0.5
    limit: float = 300.0

    def delay(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (from 1)."""
        # The exponent is capped: 2.0 ** 1100 is an OverflowError, and a key may fail for weeks.
        full = min(self.limit, self.first * 2.0 ** min(failures - 1, 64))
        return full * (0.5 + 0.5 * rng.random())


class Due(Generic[K]):
    """The queue without tasks or a clock: which key is to be worked on at a time. All times are one clock's seconds."""

    def __init__(self, backoff: Backoff, rng: random.Random) -> None:
        self._backoff = backoff
        self._rng = rng
        self._due: dict[K, float] = {}
        self._asked: dict[K, float] = {}
        self._active: set[K] = set()
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}

    def add(self, key: K, now: float, delay: float = 0.0) -> None:
        """Ask for `key` after `delay`. Of several asks the earliest counts.

        A failing key is not brought forward past its first backoff: the events that its own half-done work causes would
        otherwise turn the backoff into a busy loop.
        """
        due = max(now + delay, self._not_before.get(key, now))
        held = self._due.get(key)
        if held is None or due < held:
            self._due[key] = due
        self._asked.setdefault(key, now)

    def take(self, now: float) -> K | None:
        """The key that is due longest, marked as worked on; None when none is due. Ends with `done` or `failed`."""
        best: K | None = None
        for key, due in self._due.items():
            if due <= now and key not in self._active and (best is None or due < self._due[best]):
                best = key
        if best is not None:
            del self._due[best]
            self._asked.pop(best, None)
            self._active.add(best)
        return best

    def done(self, key: K, now: float, again: float | None = None) -> None:
        """Work on `key` succeeded; `again`: seconds until it wants to be looked at without being asked."""
        self._active.discard(key)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        if again is not None:
            self.add(key, now, again)

    def failed(self, key: K, now: float, at_least: float = 0.0) -> float:
        """Work on `key` failed; the seconds until the next try. `at_least`: what a server asked for (Retry-After)."""
        self._active.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = max(at_least, self._backoff.delay(failures, self._rng))
        self._not_before[key] = now + max(at_least, min(delay, self._backoff.first))
        held = self._due.get(key)
        if held is not None:
            # It was asked for while it ran: something changed, so it need not sit the whole backoff out.
            delay = min(delay, max(held, self._not_before[key]) - now)
        self._due[key] = now + delay
        self._asked.setdefault(key, now)
        return delay

    def forget(self, key: K) -> None:
        """The key's object is gone. Work under way on it ends as usual."""
        for held in (self._due, self._asked, self._failures, self._not_before):
            held.pop(key, None)

    def next_due(self) -> float | None:
        """When `take` will next have something; None: not before an `add` or the end of some work."""
        return min((due for key, due in self._due.items() if key not in self._active), default=None)

    def waiting(self, now: float) -> int:
        """Keys that are due and not worked on."""
        return sum(due <= now and key not in self._active for key, due in self._due.items())

    def oldest_age(self, now: float) -> float:
        """Seconds that the key due longest has been due; 0 when none is."""
        return max((now - due for key, due in self._due.items() if due <= now), default=0.0)

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)


class RetryAfter(Exception):
    """Raised by work that must be tried again, but not within `seconds`."""

    def __init__(self, seconds: float, why: str) -> None:
        super().__init__(why)
        self.seconds = seconds


class Observer(Protocol):
    def worked(self, seconds: float, result: str) -> None:
        """One piece of work ended: `success`, `error`, `timeout`."""


class WorkQueue(Generic[K]):
    """`Due` with workers. `work` returns the seconds until it wants to run again, or None."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        *,
        workers: int,
        timeout: float,
        clock: Callable[[], float],
        rng: random.Random,
        backoff: Backoff | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`timeout` is the deadline of one piece of work, in seconds."""
        self.due: Due[K] = Due(backoff or Backoff(), rng)
        self._work = work
        self._workers = workers
        self._timeout = timeout
        self._clock = clock
        self._observer = observer
        self._changed = asyncio.Event()
        self.last_turn = clock()
        """When a worker last looked for work: a stuck queue shows in its age."""

    def add(self, key: K, delay: float = 0.0) -> None:
        self.due.add(key, self._clock(), delay)
        self._changed.set()

    def forget(self, key: K) -> None:
        self.due.forget(key)

    async def run(self) -> None:
        """Work until cancelled; work under way is cancelled too. One worker that fails unforeseen ends them all."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            now = self.last_turn = self._clock()
            key = self.due.take(now)
            if key is None:
                await self._wait(now)
            else:
                await self._one(key)

    async def _wait(self, now: float) -> None:
        # No await between take() and clear(): an add in between would be missed.
        self._changed.clear()
        next_due = self.due.next_due()
        wait = 5.0 if next_due is None else min(5.0, max(0.0, next_due - now))
        try:
            async with asyncio.timeout(wait):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _one(self, key: K) -> None:
        started = self._clock()
        result = "success"
        try:
            async with asyncio.timeout(self._timeout):
                again = await self._work(key)
            self.due.done(key, self._clock(), again)
        except RetryAfter as error:
            result = "error"
            delay = self.due.failed(key, self._clock(), error.seconds)
            log.warning("%s: %s; again in %.1f s", key, error, delay)
        except TimeoutError:
            result = "timeout"
            delay = self.due.failed(key, self._clock())
            log.warning("%s: not done within %.0f s; again in %.1f s", key, self._timeout, delay)
        except Exception:
            result = "error"
            delay = self.due.failed(key, self._clock())
            log.exception("%s: unforeseen error; again in %.1f s", key, delay)
        finally:
            # Also after a cancellation: another worker may be waiting for this key to come free.
            self._changed.set()
            if self._observer is not None:
                self._observer.worked(self._clock() - started, result)
