"""The reader's side: pulls that count only if their lease was unbroken to their end, and pulls ahead of the lease."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay_engine.kv.lease_words import lease_mark
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.compat import compat_hash
from forebay_engine.transfer.connections import HANDSHAKE_SECONDS, Connections
from forebay_engine.transfer.identity import Identity, TransferCounters
from forebay_engine.transfer.lease_keeper import LeaseKeeper, Tracked
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.types import PullSource, UnsettledRead
from forebay_wire.messages import LeaseRef, ProgressRequest, ReserveRequest

log = logging.getLogger(__name__)

MAX_PULLS = 1024
CONFIRM_SECONDS = 2.0
POLL_SECONDS = 1.0
RELEASE_TRIES = 3
MAX_RELEASES = 1024
"""Owners still to be told; beyond it a lease runs out by itself."""


OnProgress = Callable[[str, int, int, int], None]
"""Engine id, epoch, blocks read, and blocks read once the read that is under way has ended."""


@dataclass(frozen=True, slots=True)
class PullResult:
    ok: bool
    reason: str
    """Empty when ok, else what went wrong, for logs."""

    bytes: int
    seconds: float
    unsettled: UnsettledRead | None = None
    """The local blocks may still be written to: don't use or free them before it is over."""


class Puller:
    """Used on one event loop."""

    def __init__(
        self,
        *,
        identity: Identity,
        connections: Connections,
        peers: PeerClient,
        keeper: LeaseKeeper,
        counters: TransferCounters,
        in_use: Callable[[], str],
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._hash = compat_hash(identity.compatibility)
        self._connections = connections
        self._peers = peers
        self._keeper = keeper
        self._counters = counters
        self._in_use = in_use
        self._timeout = timeout_seconds
        self._clock = clock
        self._running: dict[str, threading.Event] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def abort(self, request_id: str) -> None:
        """A pull under way fails as cancelled."""
        self._keeper.untrack(request_id)
        cancel = self._running.get(request_id)
        if cancel is not None:
            cancel.set()

    def ended(self, request_id: str) -> None:
        """No pull is to come. One under way ends the heartbeats itself."""
        if request_id not in self._running:
            self._keeper.untrack(request_id)

    def abort_all(self) -> None:
        for cancel in self._running.values():
            cancel.set()

    async def pull(self, source: PullSource, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> PullResult:
        started = self._clock()
        if source.request_id in self._running or len(self._running) >= MAX_PULLS:
            self._counters.failed(self._in_use(), "busy")
            return PullResult(False, f"busy: {len(self._running)} pulls under way, limit {MAX_PULLS}", 0, 0.0)
        cancel = self._running[source.request_id] = threading.Event()
        tracked = self._keeper.track(source)
        try:
            await self._pull(tracked, remote_blocks, local_blocks, started + self._timeout, cancel)
        except TransferError as error:
            self._counters.failed(self._in_use(), error.reason)
            self._give_back(source, error)
            return PullResult(False, f"{error.reason}: {error}", 0, self._clock() - started, error.unsettled)
        finally:
            del self._running[source.request_id]
            if self._keeper.get(source.request_id) is tracked:
                self._keeper.untrack(source.request_id)
        volume = len(local_blocks) * self._identity.block_bytes
        seconds = self._clock() - started
        self._counters.count(self._in_use(), volume, seconds)
        self._counters.transfers += 1
        return PullResult(True, "", volume, seconds)

    async def _pull(
        self,
        tracked: Tracked,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline: float,
        cancel: threading.Event,
    ) -> None:
        source = tracked.source
        if source.compat_hash != self._hash:
            raise TransferError(
                f"KV of engine {source.engine_id} has compatibility hash {source.compat_hash}, this engine's is "
                f"{self._hash}; pair workers of one kind only",
                reason="incompatible",
            )

        def until() -> float:
            # Asked again when the read's turn comes: heartbeats move the lease's end meanwhile.
            if tracked.gone:
                raise TransferError("the owner does not know the lease any more", reason="lease_broken")
            return min(deadline, tracked.ends - tracked.margin)

        stands = False
        if local_blocks or self._connections.knows(source.engine_id):
            await self._connections.ensure(source.engine_id, source.host, source.port, until())
            stands = await self._connections.read(
                source.engine_id,
                remote_blocks,
                local_blocks,
                until=until,
                cancel=cancel,
                lease=lease_mark(source.engine_id, source.request_id, source.epoch),
            )
        if cancel.is_set():
            raise TransferError("the request was aborted", reason="cancelled")
        if stands:
            # The blocks are ours, and whoever waits for them goes on before the owner is told.
            asyncio.get_running_loop().call_soon(self._release, source)
            return
        answer = await self._peers.complete(source.host, source.port, _ref(source), timeout=CONFIRM_SECONDS)
        if not answer.unbroken:
            raise TransferError(
                f"the lease (epoch {source.epoch}) was broken before the read was confirmed: it is discarded",
                reason="lease_broken",
            )

    def _give_back(self, source: PullSource, error: TransferError) -> None:
        if error.reason not in ("lease_broken", "peer_restarted", "peer_unreachable", "disconnected"):
            self._release(source)

    def _release(self, source: PullSource) -> None:
        """Let the owner have its blocks before the lease's end, if it still answers. Waits for nothing."""
        if len(self._releases) < MAX_RELEASES:
            task = asyncio.get_running_loop().create_task(self._tell(source))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _tell(self, source: PullSource) -> None:
        for _ in range(RELEASE_TRIES):
            try:
                await self._peers.complete(source.host, source.port, _ref(source), timeout=CONFIRM_SECONDS)
                return
            except TransferError as error:
                failure = error
                if error.reason != "peer_timeout":
                    break
        log.info("request %s: its lease was not given back, it will run out: %s", source.request_id, failure)

    async def close(self) -> None:
        """Returns when no owner waits for word of its blocks; by RELEASE_TRIES x CONFIRM_SECONDS at latest."""
        await asyncio.sleep(0)  # a release may be due in this turn of the loop
        await asyncio.gather(*self._releases)

    async def follow(self, reserve: ReserveRequest, local_blocks: Sequence[int], on_progress: OnProgress) -> None:
        try:
            await self._follow(reserve, local_blocks, on_progress, self._clock() + reserve.ttl_seconds)
        except TransferError as error:
            self._counters.failed(self._in_use(), error.reason)
            log.info("request %s: reading ahead stopped: %s", reserve.request_id, error)
            if error.unsettled is not None:
                raise

    async def _follow(
        self,
        reserve: ReserveRequest,
        local_blocks: Sequence[int],
        on_progress: OnProgress,
        deadline: float,
    ) -> None:
        host, port = reserve.prefill_host, reserve.prefill_port
        engine_id = await self._connections.connect(host, port, deadline)
        block_size = self._identity.compatibility.block_size
        epoch, count, seen = 0, 0, False
        while (left := deadline - self._clock()) > 0 and count < len(local_blocks):
            wait = min(POLL_SECONDS, left)
            news = await self._peers.progress(
                host,
                port,
                ProgressRequest(request_id=reserve.request_id, known_blocks=count, wait_seconds=wait),
                timeout=wait + HANDSHAKE_SECONDS,
            )
            if news.state == "unknown":
                if seen:
                    return
                continue
            seen = True
            if news.epoch != epoch:
                epoch, count = news.epoch, 0
                on_progress(engine_id, epoch, 0, 0)
            # The last block of a lease may be partly filled: that one is pull()'s.
            full = len(news.block_ids) if news.state == "running" else news.num_tokens // block_size
            ready = min(full, len(local_blocks))
            if ready > count:
                on_progress(engine_id, epoch, count, ready)
                await self._read_ahead(engine_id, news.block_ids[count:ready], local_blocks[count:ready], deadline)
                count = ready
                on_progress(engine_id, epoch, count, count)
            if news.state == "leased":
                return

    async def _read_ahead(
        self, engine_id: str, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline: float
    ) -> None:
        started = self._clock()
        end = min(deadline, started + self._timeout)
        cancel = threading.Event()
        await self._connections.read(engine_id, remote_blocks, local_blocks, until=lambda: end, cancel=cancel)
        volume = len(local_blocks) * self._identity.block_bytes
        self._counters.count(self._in_use(), volume, self._clock() - started)


def _ref(source: PullSource) -> LeaseRef:
    return LeaseRef(request_id=source.request_id, epoch=source.epoch)
