"""Leases on prefilled KV blocks: who may still read them, and until when.

A one-sided read cannot be fenced: a refilled block reads as success, with another request's data. So a reader makes
sure, after its read, that the lease (request id, epoch) was unbroken all the time: it reads the lease's word
(lease_words.py) or asks. This table is the owner's side of that.

Times are monotonic seconds. A lease holds while now < expires; at now == expires it is broken.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay_engine.kv.lease_words import LeaseWords


@dataclass(frozen=True, slots=True)
class Lease:
    request_id: str
    epoch: int
    blocks: tuple[int, ...]
    """In the order of the prompt; the last one may be partly filled. The lease owns one reference to each."""

    num_tokens: int
    expires: float


@dataclass(slots=True)
class _Running:
    epoch: int
    blocks: tuple[int, ...] = ()


class LeaseTable:
    """Running prefills that will be handed off, and the leases of finished ones. Thread-safe.

    The table never touches the pool: who removes a lease (complete, cancel, expire) does with its blocks what the
    method says. Each lease is handed out by exactly one of the three.
    """

    def __init__(self, lease_seconds: float, words: LeaseWords | None = None) -> None:
        """`words` show readers the leases that stand; None: readers must ask."""
        if lease_seconds <= 0:
            raise ValueError(f"lease_seconds must be above 0, got {lease_seconds}")
        self.lease_seconds = lease_seconds
        self.words = words
        self._lock = threading.Lock()
        self._last_epoch = 0
        self._running: dict[str, _Running] = {}
        self._leases: dict[int, Lease] = {}
        """By epoch, since a request id may come back while its earlier lease still stands (a retried prefill leg)."""
        self._current: dict[str, int] = {}
        """Epoch of each request id's newest lease."""
        self._blocks: Counter[int] = Counter()

    def begin(self, request_id: str) -> int:
        """A prefill that will be handed off has started. Returns its epoch, which no other prefill ever gets."""
        with self._lock:
            return self._begin(request_id)

    def _begin(self, request_id: str) -> int:
        self._last_epoch += 1
        self._running[request_id] = _Running(self._last_epoch)
        return self._last_epoch

    def advance(self, request_id: str, blocks: Sequence[int]) -> None:
        """All full blocks computed so far, in order. Ignored when the prefill was dropped or cancelled meanwhile."""
        with self._lock:
            running = self._running.get(request_id)
            if running is not None:
                running.blocks = tuple(blocks)

    def restart(self, request_id: str) -> int:
        """The prefill was preempted: its blocks are no longer its own. A new epoch tells early readers so.

        An id that is not a running prefill here (never held, or cancelled meanwhile) stays unknown.
        """
        with self._lock:
            if request_id in self._running:
                return self._begin(request_id)
            self._last_epoch += 1
            return self._last_epoch

    def grant(self, request_id: str, blocks: Sequence[int], num_tokens: int, now: float) -> Lease:
        """The prefill is done: its reference to each block becomes a lease's, for lease_seconds from now."""
        with self._lock:
            running = self._running.pop(request_id, None)
            if running is None:
                # cancel() came between the prefill's last step and now; the canceller's abort finds this lease.
                self._last_epoch += 1
            epoch = running.epoch if running is not None else self._last_epoch
            lease = Lease(request_id, epoch, tuple(blocks), num_tokens, now + self.lease_seconds)
            self._leases[epoch] = lease
            self._current[request_id] = epoch
            self._blocks.update(lease.blocks)
            if self.words is not None:
                self.words.set(request_id, epoch)
            return lease

    def drop(self, request_id: str) -> None:
        """The prefill ended without a hand-off. A lease of that id, if any, is not touched: see cancel()."""
        with self._lock:
            self._running.pop(request_id, None)

    def progress(self, request_id: str, now: float) -> tuple[str, int, tuple[int, ...], int, float]:
        """(state, epoch, blocks, num_tokens, seconds left): state is `unknown`, `running` or `leased`."""
        with self._lock:
            running = self._running.get(request_id)
            if running is not None:
                return "running", running.epoch, running.blocks, 0, 0.0
            lease = self._leases.get(self._current.get(request_id, 0))
            if lease is None or now >= lease.expires:
                return "unknown", 0, (), 0, 0.0
            return "leased", lease.epoch, lease.blocks, lease.num_tokens, lease.expires - now

    def heartbeat(self, refs: Sequence[tuple[str, int]], now: float) -> tuple[list[str], list[str]]:
        """Extend leases (request id, epoch) to a full period from now. Returns the ids (extended, gone).

        A prefill that still runs under that epoch counts as extended: its lease has yet to begin.
        """
        extended: list[str] = []
        gone: list[str] = []
        with self._lock:
            for request_id, epoch in refs:
                lease = self._find(request_id, epoch)
                running = self._running.get(request_id)
                if lease is not None and now < lease.expires:
                    # A late heartbeat (clock read before another thread's) must not shorten a lease.
                    expires = max(lease.expires, now + self.lease_seconds)
                    self._leases[epoch] = replace(lease, expires=expires)
                    extended.append(request_id)
                elif running is not None and running.epoch == epoch:
                    extended.append(request_id)
                else:
                    gone.append(request_id)
        return extended, gone

    def complete(self, request_id: str, epoch: int, now: float) -> Lease | None:
        """The reader has what it wants. A lease means: unbroken until now, and the caller frees its blocks at once.

        None: gone, expired or another epoch; the reader must discard what it read. An expired lease stays for expire().
        """
        with self._lock:
            lease = self._find(request_id, epoch)
            if lease is None or now >= lease.expires:
                return None
            return self._remove(lease)

    def cancel(self, request_id: str, now: float) -> Lease | None:
        """Nobody will read this. The caller frees the blocks at once: a reader in the middle will hear "broken".

        A running prefill becomes unknown to readers and None is returned. The caller must then abort the request in the
        step thread, and there call cancel() again: the prefill may have been granted its lease in between.
        """
        with self._lock:
            self._running.pop(request_id, None)
            lease = self._leases.get(self._current.get(request_id, 0))
            return self._remove(lease) if lease is not None else None

    def expire(self, now: float) -> list[Lease]:
        """Remove the leases that have ended. The caller quarantines their blocks for one more lease: a reader that does
        not know yet may be in the middle of a read."""
        with self._lock:
            ended = [lease for lease in self._leases.values() if now >= lease.expires]
            return [self._remove(lease) for lease in ended]

    @property
    def held_blocks(self) -> int:
        """Distinct blocks under a lease."""
        with self._lock:
            return len(self._blocks)

    def _find(self, request_id: str, epoch: int) -> Lease | None:
        lease = self._leases.get(epoch)
        return lease if lease is not None and lease.request_id == request_id else None

    def _remove(self, lease: Lease) -> Lease:
        if self.words is not None:
            self.words.clear(lease.request_id, lease.epoch)  # before any caller can free the blocks
        del self._leases[lease.epoch]
        if self._current.get(lease.request_id) == lease.epoch:
            del self._current[lease.request_id]
        self._blocks.subtract(lease.blocks)
        for block in lease.blocks:
            if self._blocks[block] <= 0:
                del self._blocks[block]
        return lease
