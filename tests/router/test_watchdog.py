"""Stall timeouts: who is too silent, and what a standstill of the router itself must not do."""

from __future__ import annotations

import asyncio
import time

import pytest

from forebay_router.discovery import Endpoint
from forebay_router.upstream import WorkerFailed
from forebay_router.watchdog import Guard, Watchdog
from forebay_router.workers import Worker
from forebay_wire.load import LoadReport


def make(now: float, heard: float | None = None) -> Worker:
    worker = Worker(Endpoint("d0", "127.0.0.1", 1, "decode", "decode"), suspect_after=2.0, wedged_after=45.0, now=now)
    worker.on_report(LoadReport("e", 1, ready=True), now if heard is None else heard, from_stream=True)
    return worker


@pytest.mark.parametrize(
    ("last", "heard", "now", "silent"),
    [
        (100.0, 120.0, 120.0, False),  # healthy: the full limit
        (100.0, 120.1, 120.1, True),
        (100.0, 100.0, 102.9, False),  # suspected: 3 s
        (100.0, 100.0, 103.1, True),
        (90.0, 101.0, 103.9, False),  # counted from the last sign of life anywhere
        (90.0, 101.0, 104.1, True),
    ],
)
def test_silence(last: float, heard: float, now: float, silent: bool) -> None:
    guard = Guard(make(0.0, heard), 20.0, last)
    assert guard.silent(now, 3.0) is silent
    guard.paused = True
    assert not guard.silent(now, 3.0)


async def test_a_stalled_leg_is_given_up() -> None:
    clock = asyncio.get_running_loop().time
    watchdog = Watchdog(clock, 3.0)
    with pytest.raises(WorkerFailed, match="stalled"):
        async with asyncio.timeout(10), watchdog.watch(make(clock()), 0.2):
            await asyncio.Event().wait()
    watchdog.close()


async def test_other_timeouts_pass_through() -> None:
    clock = asyncio.get_running_loop().time
    watchdog = Watchdog(clock, 3.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), watchdog.watch(make(clock()), 60.0):
            await asyncio.Event().wait()
    watchdog.close()


async def test_a_standstill_of_the_router_is_not_the_workers() -> None:
    """What arrived while this process could not run is read before anyone is judged."""
    clock = asyncio.get_running_loop().time
    watchdog = Watchdog(clock, 0.5)
    worker = make(clock())
    async with watchdog.watch(worker, 0.9) as guard:
        time.sleep(1.2)  # blocks the loop: that is the standstill
        for _ in range(3):
            await asyncio.sleep(0)  # the overdue tick runs before anything that has arrived is read
        guard.alive(clock())
        worker.on_report(LoadReport("e", 2, ready=True), clock(), from_stream=True)
        await asyncio.sleep(0.3)
    watchdog.close()
