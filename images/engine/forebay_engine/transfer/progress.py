"""The thread that drives a transport for its peers: often while they are to be expected, seldom while not."""

from __future__ import annotations

import threading
from collections.abc import Callable

BUSY_SECONDS = 0.0003
IDLE_SECONDS = 0.015
"""Bounds how late an unexpected peer is answered. The two replace NIXL's own progress thread, which takes a core."""


class ProgressThread:
    """Calls `progress()` every BUSY_SECONDS while `busy()`, else every IDLE_SECONDS."""

    def __init__(self, progress: Callable[[], None], busy: Callable[[], bool]) -> None:
        self._progress = progress
        self._busy = busy
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-transfer-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look at `busy()` now. Safe from any thread."""
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping:
            self._progress()
            self._wake.wait(BUSY_SECONDS if self._busy() else IDLE_SECONDS)
            self._wake.clear()
