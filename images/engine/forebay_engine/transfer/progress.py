"""The thread that drives a transport for its peers: often while they are to be expected, seldom while not."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.0003
"""Between two calls while a peer connects, or reads through our processor (TCP)."""

LEASED_SECONDS = 0.001
"""While there is something to read. Readers over shared memory or RDMA need no help, and each call takes time from
their copies where the two share a core's caches; the first request of one over TCP waits so long at most."""

IDLE_SECONDS = 0.015
"""Bounds how late an unexpected peer is answered. The three replace NIXL's own progress thread, which takes a core."""

WORK_SECONDS = 50e-6
"""A call that takes longer has moved bytes (one with nothing to do takes 10 us), and more are to come."""

ACTIVE_SECONDS = 0.02
"""How long after such a call its peer is taken to be reading."""

LOG_SECONDS = 60.0
"""Between two words on calls that fail."""


class ProgressThread:
    """Calls `progress()` every BUSY_SECONDS while `expecting()` a peer, every LEASED_SECONDS while blocks are
    `leased()`, else every IDLE_SECONDS; a peer that is found reading gets BUSY_SECONDS."""

    def __init__(
        self,
        progress: Callable[[], None],
        *,
        expecting: Callable[[], bool],
        leased: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._progress = progress
        self._expecting = expecting
        self._leased = leased
        self._clock = clock
        self._active_until = 0.0
        self._logged_at = -math.inf
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-transfer-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look at `expecting()` and `leased()` now. Safe from any thread."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def step(self) -> float:
        """One call, and the seconds until the next. A call that fails is logged: without this thread no peer could
        connect or read through our processor any more."""
        began = self._clock()
        try:
            self._progress()
        except Exception:
            if began >= self._logged_at + LOG_SECONDS:
                self._logged_at = began
                log.exception("driving the KV transport failed; it is tried again, and said again in %g s", LOG_SECONDS)
            return IDLE_SECONDS
        ended = self._clock()
        if ended - began > WORK_SECONDS:
            self._active_until = ended + ACTIVE_SECONDS
        if self._expecting():
            return BUSY_SECONDS
        if not self._leased():
            return IDLE_SECONDS
        return BUSY_SECONDS if ended < self._active_until else LEASED_SECONDS

    def _run(self) -> None:
        while not self._stopping:
            pause = self.step()
            if pause < IDLE_SECONDS:
                time.sleep(pause)  # a third of what waiting for an event costs
            else:
                self._wake.wait(pause)
                self._wake.clear()
