"""The beginnings of prompts that this worker's prefix cache got, for routers that did not send them."""

from __future__ import annotations

from collections import deque

from forebay_wire.prefix import PrefixEntry

MAX_ENTRIES = 8192
"""What a router that connects anew is told; as many as it keeps of one worker."""

MAX_LINE_ENTRIES = 1500
"""Of one line of the load stream: 45 KB, where a router reads 64 KiB at most."""


class PrefixLog:
    """The latest prompts, oldest first. A reader keeps the cursor that it was given last, 0 to begin with."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._prompts: deque[list[PrefixEntry]] = deque()
        self._entries = 0
        self._forgotten = 0
        """Prompts that were in the log before its oldest one."""

    def add(self, entries: list[PrefixEntry]) -> None:
        if not entries:
            return
        self._prompts.append(entries)
        self._entries += len(entries)
        while self._entries > self._max_entries and len(self._prompts) > 1:
            self._entries -= len(self._prompts.popleft())
            self._forgotten += 1

    def since(self, cursor: int, max_entries: int = MAX_LINE_ENTRIES) -> tuple[list[list[PrefixEntry]], int]:
        """Prompts from `cursor` on, whole ones, and the cursor after them. One prompt at least when there is any."""
        found: list[list[PrefixEntry]] = []
        at = max(0, cursor - self._forgotten)
        room = max_entries
        while at < len(self._prompts) and (not found or len(self._prompts[at]) <= room):
            found.append(self._prompts[at])
            room -= len(self._prompts[at])
            at += 1
        return found, self._forgotten + at
