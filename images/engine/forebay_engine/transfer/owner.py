"""The owner's side: leases answered, confirmed and expired, and news of prefills that still run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from forebay_engine.kv.lease_words import COUNT
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.base import Transport
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.identity import Identity, TransferCounters
from forebay_engine.transfer.progress import ProgressThread
from forebay_wire.messages import (
    CompleteResponse,
    Handshake,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
)

log = logging.getLogger(__name__)

MAX_LONG_POLLS = 512
MAX_POLL_SECONDS = 5.0
LOOK_SECONDS = 0.02
"""How often a long poll looks by itself, should nobody call wake()."""

EXPECT_PEER_SECONDS = 2.0
"""After a handshake or a poll a peer's first read is near: connection set-up needs both sides to make progress."""


class Owner:
    """Runs on one event loop; `wake` may be called from any thread."""

    def __init__(
        self,
        *,
        identity: Identity,
        transport: Transport,
        leases: LeaseTable,
        counters: TransferCounters,
        on_freed: Callable[[tuple[int, ...]], None],
        on_expired: Callable[[tuple[int, ...]], None],
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._transport = transport
        self._leases = leases
        self._counters = counters
        self._on_freed = on_freed
        self._on_expired = on_expired
        self._clock = clock
        self._expect_peer_until = 0.0
        self._driver = ProgressThread(
            transport.progress,
            expecting=lambda: self._clock() < self._expect_peer_until,
            leased=lambda: self._leases.held_blocks > 0,
        )
        self._changed = asyncio.Event()
        self._long_polls = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._transport.needs_progress:
            self._driver.start()

    def stop(self) -> None:
        self._driver.stop()

    def wake(self) -> None:
        self._driver.wake()
        if self._loop is not None and self._long_polls:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._changed.set)

    def handshake(self) -> Handshake:
        self._expect_peer()
        identity, words = self._identity, self._leases.words
        return Handshake(
            engine_id=identity.engine_id,
            compatibility=identity.compatibility,
            compat_hash=compat_hash(identity.compatibility),
            transport=identity.transport,
            agent=self._transport.agent(),
            base_address=identity.base_address,
            block_bytes=identity.block_bytes,
            num_blocks=identity.num_blocks,
            words_address=0 if words is None else words.address,
            num_words=0 if words is None else COUNT,
            memory=identity.place.kind,
            device=identity.place.device,
        )

    def heartbeat(self, leases: Sequence[LeaseRef]) -> HeartbeatResponse:
        extended, gone = self._leases.heartbeat([(r.request_id, r.epoch) for r in leases], self._clock())
        return HeartbeatResponse(extended=extended, gone=gone)

    def complete(self, lease: LeaseRef) -> CompleteResponse:
        ended = self._leases.complete(lease.request_id, lease.epoch, self._clock())
        if ended is None:
            return CompleteResponse(unbroken=False)
        self._on_freed(ended.blocks)
        return CompleteResponse(unbroken=True)

    async def progress(self, request: ProgressRequest) -> ProgressResponse:
        self._expect_peer()
        deadline = self._clock() + min(request.wait_seconds, MAX_POLL_SECONDS)
        while True:
            state, epoch, blocks, tokens, left = self._leases.progress(request.request_id, self._clock())
            # An id never heard of is about to arrive; a known_blocks above 0 tells that it was here, so it is gone.
            news = state == "leased" or len(blocks) != request.known_blocks
            remaining = deadline - self._clock()
            if news or remaining <= 0 or self._long_polls >= MAX_LONG_POLLS:
                return ProgressResponse(
                    state=state, block_ids=list(blocks), epoch=epoch, num_tokens=tokens, lease_seconds=left
                )
            self._long_polls += 1
            try:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(remaining, LOOK_SECONDS))
            finally:
                self._long_polls -= 1

    async def expire_leases(self) -> None:
        """Until cancelled."""
        period = min(1.0, max(0.02, self._leases.lease_seconds / 20))
        while True:
            for lease in self._leases.expire(self._clock()):
                self._counters.leases_expired += 1
                log.warning(
                    "request %s: lease %d expired, its %d blocks are quarantined",
                    lease.request_id,
                    lease.epoch,
                    len(lease.blocks),
                )
                self._on_expired(lease.blocks)
            await asyncio.sleep(period)

    def _expect_peer(self) -> None:
        self._expect_peer_until = self._clock() + EXPECT_PEER_SECONDS
        self._driver.wake()
