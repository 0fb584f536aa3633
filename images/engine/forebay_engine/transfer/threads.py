"""Blocking calls from the event loop, which must be over before their caller goes on."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from forebay_engine.transfer.base import TransferError

T = TypeVar("T")

CLOSE_SECONDS = 3.0
"""For calls under way to end once the pool is closed. Longer than SETTLE_SECONDS of shared memory (nixl_reads.py), less
than a core has to leave (core/child.py)."""


class _Call(Generic[T]):
    """Its fields are the event loop's, but for `job`."""

    __slots__ = ("error", "future", "job", "loop", "over", "waiter")

    def __init__(self, job: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.over = False
        self.waiter: asyncio.Future[None] | None = None
        """Of a cancelled caller: its `future` was cancelled with it."""

        self.error: BaseException | None = None
        """What the job raised, when nobody waited for `future` any more."""

    def end(self, result: Any, error: BaseException | None) -> None:
        self.over = True
        if self.future.done():
            self.error = error
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)
        elif error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    async def ended(self) -> BaseException | None:
        """Waits until the job is over, whoever cancels the caller meanwhile. Returns what it raised."""
        while not self.over:
            if self.waiter is None:
                self.waiter = self.loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self.waiter})
        return self.error if self.future.cancelled() else self.future.exception()


class ThreadPool:
    """At most `limit` daemon threads, started when first needed. Used on one event loop.

    Does what a ThreadPoolExecutor does with one hop less: there and back in 0.2 ms instead of 0.3 when the caches are
    full of a read's bytes, and a read of 100 MB takes 8 ms. The queue is as long as its callers let it be.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._closed = False

    async def run(self, job: Callable[[], T], cancel: threading.Event | None = None) -> T:
        """What `job` returns or raises. A cancelled caller sets `cancel` and waits all the same: the job writes to
        memory.

        Then raises CancelledError; but an unsettled TransferError goes first, since it says which memory is in doubt.
        """
        if self._closed:
            raise TransferError(f"no thread of {self._name} is left: they were closed", reason="closed")
        call = _Call(job, asyncio.get_running_loop())
        self._unfinished += 1
        if len(self._threads) < min(self._unfinished, self._limit):
            self._start()
        self._calls.put(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if cancel is not None:
                cancel.set()
            error = await call.ended()
            if isinstance(error, TransferError) and error.unsettled is not None:
                raise error from None
            raise

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Cancels the calls that no thread has begun, and returns when those under way are over.

        Raises TransferError after `seconds` when one is not: NIXL hangs inside it, and may still write to memory.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.future.cancel()
                    self._ended(call, None, None)
        for _ in self._threads:
            self._calls.put(None)

        def join() -> int:
            end = time.monotonic() + seconds
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
            return sum(thread.is_alive() for thread in self._threads)

        hanging = await asyncio.get_running_loop().run_in_executor(None, join)
        if hanging:
            raise TransferError(
                f"{hanging} of {len(self._threads)} threads of {self._name} are still in a call {seconds:g} s after "
                "the end; what they read to must not be used any more",
                reason="wedged",
            )

    def _start(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = call.job()
            except BaseException as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                call.loop.call_soon_threadsafe(self._ended, call, result, error)
            del call, result, error  # not kept alive while there is nothing to do

    def _ended(self, call: _Call[Any], result: Any, error: BaseException | None) -> None:
        self._unfinished -= 1
        call.end(result, error)
