"""Calls in threads: their outcome, cancelled callers, and an end that leaves nothing running."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.threads import ThreadPool
from forebay_engine.types import UnsettledRead

SECONDS = 30.0
"""For what is to happen at once."""


@pytest.fixture
async def pool() -> AsyncIterator[ThreadPool]:
    made = ThreadPool(2, "test")
    yield made
    await made.close()


class Job:
    """Runs until `release`; `begun` tells that it does."""

    def __init__(self, outcome: Callable[[], object] = lambda: None) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self.ended = False
        self._outcome = outcome

    def __call__(self) -> object:
        self.begun.set()
        assert self.release.wait(SECONDS)
        self.ended = True
        return self._outcome()

    async def runs(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, SECONDS)


def raising(error: BaseException) -> Callable[[], object]:
    def job() -> object:
        raise error

    return job


async def test_what_a_job_returns_or_raises_is_its_callers(pool: ThreadPool) -> None:
    assert await pool.run(lambda: 7) == 7
    for error in (TransferError("x", reason="timeout"), ValueError("x"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            await pool.run(raising(error))
        assert caught.value is error
    names = {await pool.run(lambda: threading.current_thread().name) for _ in range(8)}
    assert names <= {"test-0", "test-1"}, "a job that raised ends no thread"


async def test_threads_are_started_when_needed_and_never_more_than_the_limit(pool: ThreadPool) -> None:
    assert not pool._threads
    await pool.run(lambda: None)
    await pool.run(lambda: None)
    assert len(pool._threads) == 1
    jobs = [Job() for _ in range(4)]
    calls = [asyncio.create_task(pool.run(job)) for job in jobs]
    await asyncio.gather(jobs[0].runs(), jobs[1].runs())
    assert len(pool._threads) == 2
    assert not jobs[2].begun.is_set()
    for job in jobs:
        job.release.set()
    await asyncio.wait_for(asyncio.gather(*calls), SECONDS)
    assert len(pool._threads) == 2


async def test_a_cancelled_caller_waits_until_its_job_is_over(pool: ThreadPool) -> None:
    job, cancel = Job(), threading.Event()
    task = asyncio.create_task(pool.run(job, cancel))
    await job.runs()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert cancel.is_set()
    assert not task.done()
    job.release.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, SECONDS)
    assert job.ended


@pytest.mark.parametrize("reason", ["unsettled", "timeout"])
async def test_only_an_unsettled_read_goes_before_the_cancellation(pool: ThreadPool, reason: str) -> None:
    error = TransferError("x", reason=reason, unsettled=UnsettledRead() if reason == "unsettled" else None)
    job = Job(raising(error))
    task = asyncio.create_task(pool.run(job))
    await job.runs()
    task.cancel()
    await asyncio.sleep(0)
    job.release.set()
    with pytest.raises(TransferError if reason == "unsettled" else asyncio.CancelledError) as caught:
        await asyncio.wait_for(task, SECONDS)
    assert (caught.value is error) == (reason == "unsettled")


async def test_a_job_that_ended_as_its_caller_was_cancelled_is_not_waited_for_again(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation comes between the job's end and its caller's turn: the blocks in doubt must not be lost."""
    error = TransferError("x", reason="unsettled", unsettled=UnsettledRead())
    job = Job(raising(error))
    task = asyncio.create_task(pool.run(job))
    await job.runs()
    ended, told = pool._ended, asyncio.Event()

    def cancelled_too(*args: Any) -> None:
        ended(*args)
        task.cancel()
        told.set()

    monkeypatch.setattr(pool, "_ended", cancelled_too)
    job.release.set()
    await asyncio.wait_for(told.wait(), SECONDS)
    with pytest.raises(TransferError) as caught:
        await asyncio.wait_for(task, SECONDS)
    assert caught.value is error


async def test_a_caller_cancelled_in_the_queue_waits_its_turn() -> None:
    """Its job hears of it by `cancel`, and ends as soon as a thread gets to it."""
    pool = ThreadPool(1, "test")
    first, cancel = Job(), threading.Event()
    running = asyncio.create_task(pool.run(first))
    await first.runs()
    heard: list[bool] = []
    queued = asyncio.create_task(pool.run(lambda: heard.append(cancel.is_set()), cancel))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.sleep(0)
    assert cancel.is_set()
    assert not queued.done()
    first.release.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(queued, SECONDS)
    assert heard == [True]
    await running
    await pool.close()


async def test_close_waits_for_what_runs_cancels_what_is_queued_and_refuses_what_comes() -> None:
    pool = ThreadPool(1, "test")
    job, never = Job(), Job()
    running = asyncio.create_task(pool.run(job))
    await job.runs()
    queued = asyncio.create_task(pool.run(never))
    given_up = asyncio.create_task(pool.run(never))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    closing = asyncio.create_task(pool.close())
    done, _ = await asyncio.wait({queued, given_up}, timeout=SECONDS)
    assert done == {queued, given_up}
    assert queued.cancelled()
    assert given_up.cancelled()
    assert not closing.done()
    with pytest.raises(TransferError, match="closed"):
        await pool.run(lambda: None)
    (thread,) = pool._threads
    job.release.set()
    await asyncio.wait_for(closing, SECONDS)
    assert not thread.is_alive()
    assert not never.begun.is_set()
    await asyncio.wait_for(running, SECONDS)
    await pool.close()


async def test_close_says_what_hangs() -> None:
    """NIXL never comes back from a call: who closes is told in time, since memory must not be freed under it."""
    pool = ThreadPool(2, "test")
    job = Job()
    running = asyncio.create_task(pool.run(job))
    await job.runs()
    with pytest.raises(TransferError, match=r"1 of 1 threads of test are still in a call 0\.05 s after") as caught:
        await asyncio.wait_for(pool.close(0.05), SECONDS)
    assert caught.value.reason == "wedged"
    job.release.set()
    await asyncio.wait_for(running, SECONDS)
    await pool.close(SECONDS)


async def test_an_idle_thread_keeps_nothing_of_its_last_job_alive(pool: ThreadPool) -> None:
    class Blocks:
        def __call__(self) -> None: ...

    blocks = Blocks()
    seen = weakref.ref(blocks)
    await pool.run(blocks)
    del blocks
    await pool.run(lambda: None)  # the thread has gone on
    gc.collect()
    assert seen() is None
