"""Which workers there are. One interface; here with the workers file that local mode writes, in pods.py with pods."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from forebay_wire.discovery import WorkerEntry, WorkersFile

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
FRESH_SECONDS = 2.0
"""A file changed this recently is read again: two writes within one tick of the file clock look like one."""

ROLES = ("prefill", "decode")
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker to serve with. `role` is None while the operator has not set it and the grace period runs."""

    name: str
    host: str
    port: int
    pool: str
    role: str | None
    draining: bool = False
    """It gets nothing new; what runs on it goes on."""


View = tuple[Endpoint, ...]


class Discovery(Protocol):
    async def run(self, on_view: Callable[[View], None]) -> None:
        """Call `on_view` with every view that differs from the one before; never returns, raises only cancellation."""


class BadWorkersFile(ValueError):
    pass


def parse_workers(raw: bytes) -> list[WorkerEntry]:
    """The file's entries. Raises BadWorkersFile with the entry and value at fault."""
    try:
        entries = msgspec.json.decode(raw, type=WorkersFile).workers
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadWorkersFile(str(error)) from error
    if len(entries) > MAX_WORKERS:
        raise BadWorkersFile(f"{len(entries)} workers, at most {MAX_WORKERS} are allowed")
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise BadWorkersFile(f"worker {entry.name!r} is listed twice")
        names.add(entry.name)
        if not 1 <= entry.port <= 65535:
            raise BadWorkersFile(f"worker {entry.name!r}: port {entry.port} is not in 1..65535")
        if entry.pool not in ROLES or entry.role not in (*ROLES, None):
            raise BadWorkersFile(
                f"worker {entry.name!r}: pool {entry.pool!r} and role {entry.role!r} must be one of {ROLES}"
            )
    return entries


class Roles:
    """Gives each entry the role it serves in.

    Without a role for longer than the grace period (the operator is away), or when no entry ever had one (there is no
    operator), the home pool counts.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._without_since: dict[str, float] = {}
        self._operated = False

    def resolve(self, entries: Iterable[WorkerEntry], now: float) -> View:
        entries = list(entries)
        self._operated |= any(entry.role is not None for entry in entries)
        without = {entry.name for entry in entries if entry.role is None}
        self._without_since = {name: self._without_since.get(name, now) for name in without}
        return tuple(
            Endpoint(entry.name, entry.host, entry.port, entry.pool, self._role(entry, now), entry.draining)
            for entry in entries
        )

    def _role(self, entry: WorkerEntry, now: float) -> str | None:
        if entry.role is not None:
            return entry.role
        waited = now - self._without_since[entry.name]
        return entry.pool if not self._operated or waited >= self._grace else None


class WorkersFileDiscovery:
    """Polls the file; a broken or missing one leaves the last good view in place, and is logged once."""

    def __init__(self, path: Path, grace: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._roles = Roles(grace)
        self._clock = clock
        self._entries: list[WorkerEntry] = []
        self._signature: tuple[int, int, int] | None = None
        self._complaint: str | None = None

    async def run(self, on_view: Callable[[View], None]) -> None:
        view: View | None = None
        while True:
            latest = self.poll()
            if latest != view:
                view = latest
                on_view(latest)
            await asyncio.sleep(POLL_SECONDS)

    def poll(self) -> View:
        """The view as of now. The file is a local one of a few KB: reading it does not hold the loop up."""
        try:
            status = os.stat(self._path)
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            if signature != self._signature or time.time() - status.st_mtime < FRESH_SECONDS:
                self._entries = parse_workers(self._path.read_bytes())
                self._signature = signature
                self._complain(None)
        except (OSError, BadWorkersFile) as error:
            self._signature = None
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._complain(f"workers file {self._path}: {reason}; keeping the {len(self._entries)} workers known")
        return self._roles.resolve(self._entries, self._clock())

    def _complain(self, text: str | None) -> None:
        if text is not None and text != self._complaint:
            log.warning("%s", text)
        elif text is None and self._complaint is not None:
            log.info("workers file %s is good again", self._path)
        self._complaint = text
