"""Moves KV between workers under leases: one-sided reads can't be fenced, so the lease is what makes them safe.

The owner leases blocks out, answers heartbeats, shows which leases stand, and quarantines the blocks of one that ran
out. The reader reads only inside the lease by its own clock, and uses what it read only when it has seen afterwards
that the lease was unbroken: by the lease's word (kv/lease_words.py), read as the blocks are, or else by asking. The
owner is told then that it may have its blocks back. Runs on one event loop, never blocks it, retries no read: the
caller recomputes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from forebay_engine.core.handle import CoreStats
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.base import TransferError, Transport
from forebay_engine.transfer.connections import Connections
from forebay_engine.transfer.identity import Identity, TransferCounters
from forebay_engine.transfer.lease_keeper import LeaseKeeper, margin
from forebay_engine.transfer.owner import Owner
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.puller import OnProgress, Puller, PullResult
from forebay_engine.types import PullSource
from forebay_wire.messages import (
    CompleteResponse,
    Handshake,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
    ReserveRequest,
)

__all__ = ["Identity", "PullResult", "TransferCounters", "TransferService"]

log = logging.getLogger(__name__)


class TransferService:
    def __init__(
        self,
        *,
        identity: Identity,
        transport: Transport,
        leases: LeaseTable,
        peers: PeerClient,
        on_freed: Callable[[tuple[int, ...]], None],
        on_expired: Callable[[tuple[int, ...]], None],
        pull_timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_freed` and `on_expired` are called on the event loop: blocks to reuse at once, and to quarantine for one
        more lease. The service owns `transport` and `peers` and closes them. Raises ValueError when a pull could
        outlast its lease."""
        longest = leases.lease_seconds - margin(leases.lease_seconds)
        if not 0 < pull_timeout_seconds <= longest:
            raise ValueError(
                f"pull timeout of {pull_timeout_seconds} s must be above 0 and at most {longest:g} s, the lease of "
                f"{leases.lease_seconds:g} s less its margin; shorten spec.transfer.timeoutSeconds"
            )
        self.counters = TransferCounters()
        self._transport = transport
        self._peers = peers
        self._clock = clock
        self._pull_timeout = pull_timeout_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._owner = Owner(
            identity=identity,
            transport=transport,
            leases=leases,
            counters=self.counters,
            on_freed=on_freed,
            on_expired=on_expired,
            clock=clock,
        )
        self._keeper = LeaseKeeper(peers.heartbeat, clock)
        self._connections = Connections(identity=identity, transport=transport, peers=peers, clock=clock)
        self._puller = Puller(
            identity=identity,
            connections=self._connections,
            peers=peers,
            keeper=self._keeper,
            counters=self.counters,
            in_use=transport.in_use,
            timeout_seconds=pull_timeout_seconds,
            clock=clock,
        )

    async def start(self) -> None:
        self._owner.start()
        self._spawn(self._owner.expire_leases())
        self._spawn(self._keeper.run())

    async def stop(self) -> None:
        """Ends pulls (they fail as cancelled), then the transport; when it returns nothing writes to the arena."""
        self._puller.abort_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connections.close()
        await self._puller.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._owner.stop)
        await loop.run_in_executor(None, self._transport.close)
        await self._peers.close()

    def wake(self) -> None:
        """A prefill advanced or was leased: long polls look now, the transport is driven. Safe from any thread."""
        self._owner.wake()

    def fill(self, stats: CoreStats) -> CoreStats:
        """The same snapshot with the transfer's figures. Safe from any thread."""
        return msgspec.structs.replace(stats, transport=self._transport.in_use(), transfers=dict(self.counters.totals))

    # The owner's side

    def handshake(self) -> Handshake:
        return self._owner.handshake()

    def heartbeat(self, leases: Sequence[LeaseRef]) -> HeartbeatResponse:
        return self._owner.heartbeat(leases)

    def complete(self, lease: LeaseRef) -> CompleteResponse:
        return self._owner.complete(lease)

    async def progress(self, request: ProgressRequest) -> ProgressResponse:
        """Answers when there is other news than `known_blocks`, or after `wait_seconds` (5 s at most)."""
        return await self._owner.progress(request)

    # The reader's side

    @property
    def warm_pairs(self) -> frozenset[str]:
        """Engine ids that can be read without a handshake."""
        return self._connections.warm

    def warm(self, host: str, port: int) -> asyncio.Task[None]:
        """Begin the handshake and the first read, unless made, so that a pull to come does not pay for them.

        The task may raise TransferError; nobody has to wait for it.
        """
        return self._spawn(self._connections.warm_up(host, port, self._clock() + self._pull_timeout))

    def track(self, source: PullSource) -> None:
        """Keep the lease alive from now on, also while the request waits for blocks."""
        self._keeper.track(source)

    def ended(self, request_id: str) -> None:
        """The request is over, in whatever way: nothing waits for its lease, unless a pull is ending it right now."""
        self._puller.ended(request_id)

    def untrack(self, request_id: str) -> None:
        """End the heartbeats; a pull under way fails as cancelled."""
        self._puller.abort(request_id)

    async def pull(self, source: PullSource, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> PullResult:
        """Read remote_blocks[i] into local_blocks[i], make sure that the lease was unbroken, and end it.

        With empty lists there is nothing to read (all was read by follow()). The owner may hear of the end later.
        Failures are in the result, never raised. When this returns or raises, nothing writes to the local blocks any
        more; unless `ok`, their content is undefined.
        """
        return await self._puller.pull(source, remote_blocks, local_blocks)

    async def follow(self, reserve: ReserveRequest, local_blocks: Sequence[int], on_progress: OnProgress) -> None:
        """Pull a running prefill's full blocks as they are finished: the owner's block i into local_blocks[i].

        `on_progress(engine id, epoch, count, coming)`: the first `count` local blocks hold KV read there under that
        epoch, and the first `coming` will once the read that has begun is over; a new epoch begins with 0. What was
        read counts only if the lease that pull() confirms later is of the same engine and epoch (epochs are unique
        within one engine only). Returns when the prefill is leased, gone, out of time (ttl_seconds) or a read failed;
        when cancelled, after its read is over.
        Raises only an unsettled TransferError: the local blocks must not be used before that is over.
        """
        await self._puller.follow(reserve, local_blocks, on_progress)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TransferError):
            log.error("a transfer task failed", exc_info=error)
