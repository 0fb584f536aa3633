"""The reader's side of leases: heartbeats from admission on, and until when each lease surely stands.

Times are this process's monotonic clock. A lease is taken to end `lease_seconds` after the moment its last answered
heartbeat was *sent*: the owner counts from a later one, so ours is the earlier end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from forebay_engine.transfer.base import TransferError
from forebay_engine.types import PullSource
from forebay_wire.messages import HeartbeatResponse, LeaseRef

log = logging.getLogger(__name__)


class Send(Protocol):
    def __call__(self, host: str, port: int, leases: list[LeaseRef], *, timeout: float) -> Awaitable[HeartbeatResponse]:
        """The owner's answer, by `timeout` seconds at latest; raises TransferError."""


@dataclass(slots=True)
class Tracked:
    source: PullSource
    ends: float
    due: float
    gone: bool = False

    @property
    def margin(self) -> float:
        return margin(self.source.lease_seconds)


def margin(lease_seconds: float) -> float:
    """Seconds before a lease's end at which its reader gives up: covers the params' way here and a late timer."""
    return min(5.0, lease_seconds / 6)


class LeaseKeeper:
    """Heartbeats every lease / 6, one request a peer for all its leases; a slow peer delays no other."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._changed = asyncio.Event()
        self._busy: set[tuple[str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def track(self, source: PullSource) -> Tracked:
        """Start heartbeats. Tracking the same lease again changes nothing."""
        known = self._tracked.get(source.request_id)
        if known is not None and (known.source.engine_id, known.source.epoch) == (source.engine_id, source.epoch):
            return known
        now = self._clock()
        tracked = Tracked(source, now + source.lease_seconds, now + source.lease_seconds / 6)
        self._tracked[source.request_id] = tracked
        self._changed.set()
        return tracked

    def untrack(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)

    def get(self, request_id: str) -> Tracked | None:
        return self._tracked.get(request_id)

    def __len__(self) -> int:
        return len(self._tracked)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._changed.clear()
                self._beat()
                pause = min((t.source.lease_seconds for t in self._tracked.values()), default=None)
                if pause is None:
                    await self._changed.wait()
                else:
                    await asyncio.sleep(max(0.005, pause / 24))
        finally:
            for task in self._tasks:
                task.cancel()

    def _beat(self) -> None:
        now = self._clock()
        peers = {
            (t.source.host, t.source.port) for t in self._tracked.values() if t.due <= now and not t.gone
        } - self._busy
        for peer in peers:
            self._busy.add(peer)
            task = asyncio.create_task(self._beat_peer(*peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _beat_peer(self, host: str, port: int) -> None:
        leases = [t for t in self._tracked.values() if (t.source.host, t.source.port) == (host, port) and not t.gone]
        if not leases:  # given up since this beat was begun
            self._busy.discard((host, port))
            return
        sent = self._clock()
        try:
            timeout = min(t.source.lease_seconds for t in leases) / 6
            refs = [LeaseRef(request_id=t.source.request_id, epoch=t.source.epoch) for t in leases]
            answer = await self._send(host, port, refs, timeout=timeout)
        except TransferError as error:
            # `due` stays: the next round tries again, until the lease's end by our clock stops the reader.
            log.warning("heartbeat to %s:%d failed: %s", host, port, error)
            return
        finally:
            self._busy.discard((host, port))
        extended, gone = set(answer.extended), set(answer.gone)
        for t in leases:
            if t.source.request_id in extended:
                t.ends = sent + t.source.lease_seconds
                t.due = sent + t.source.lease_seconds / 6
            elif t.source.request_id in gone:
                t.gone = True
