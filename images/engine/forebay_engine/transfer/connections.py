"""Peers this process can read: one handshake each, checked, cached by engine id, and reads that end when they must."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from forebay_engine.kv.lease_words import LeaseMark
from forebay_engine.transfer.base import TransferError, Transport
from forebay_engine.transfer.compat import compat_hash, differences
from forebay_engine.transfer.identity import Identity
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.threads import ThreadPool
from forebay_wire.messages import Handshake

HANDSHAKE_SECONDS = 2.0
MAX_PEERS = 512
READ_THREADS = 8
CONNECT_THREADS = 4
READS_PER_PEER = 2
"""More reads of one peer are no faster, and a peer that hangs must not take every thread."""


class Connections:
    """Used on one event loop; the transport's blocking calls run in two bounded thread pools."""

    def __init__(
        self, *, identity: Identity, transport: Transport, peers: PeerClient, clock: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._hash = compat_hash(identity.compatibility)
        self._transport = transport
        self._peers = peers
        self._clock = clock
        self._engines: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._verified: set[str] = set()
        self._handshakes: dict[tuple[str, int], asyncio.Task[str]] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._read_pool = ThreadPool(READ_THREADS, "forebay-read")
        self._connect_pool = ThreadPool(CONNECT_THREADS, "forebay-connect")

    def knows(self, engine_id: str) -> bool:
        """Whether this engine can be read without a handshake."""
        return engine_id in self._verified and self._transport.knows(engine_id)

    @property
    def warm(self) -> frozenset[str]:
        """Every engine id that can."""
        return frozenset(engine for engine in self._verified if self.knows(engine))

    async def close(self) -> None:
        """Returns when no read runs any more."""
        for task in list(self._handshakes.values()):
            task.cancel()
        await asyncio.gather(*self._handshakes.values(), return_exceptions=True)
        await self._read_pool.close()
        await self._connect_pool.close()

    async def ensure(self, engine_id: str, host: str, port: int, deadline: float) -> None:
        """Make this engine readable. Raises TransferError, also when another engine lives at the address by now."""
        if self.knows(engine_id):
            return
        found = await self.connect(host, port, deadline)
        if found != engine_id:
            raise TransferError(
                f"{host}:{port} is engine {found} now, the KV was at {engine_id}: it restarted", reason="peer_restarted"
            )

    async def warm_up(self, host: str, port: int, deadline: float) -> None:
        """Make whatever engine is at the address readable, unless one that was there is. Raises TransferError."""
        known = self._engines.get((host, port))
        if known is None or not self.knows(known):
            await self.connect(host, port, deadline)

    async def connect(self, host: str, port: int, deadline: float) -> str:
        """The engine id at an address, readable by the transport. Calls for one address share one handshake."""
        key = (host, port)
        task = self._handshakes.get(key)
        if task is None:
            task = self._handshakes[key] = asyncio.create_task(self._handshake(host, port))
            task.add_done_callback(lambda done: self._handshake_ended(key, done))
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise TransferError(f"no handshake with {host}:{port} in time", reason="timeout") from error

    async def read(
        self,
        engine_id: str,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        until: Callable[[], float],
        cancel: threading.Event,
        lease: LeaseMark | None = None,
    ) -> bool:
        """One Transport.read in a thread, by the deadline `until()` gives when its turn comes.

        Returns or raises (CancelledError too) only when the read is over.
        """
        gate = self._gates.get(engine_id)
        if gate is None:
            gate = self._gates[engine_id] = asyncio.Semaphore(READS_PER_PEER)
        if not gate.locked():
            await gate.acquire()  # at once: no timer is needed
        else:
            try:
                async with asyncio.timeout(until() - self._clock()):
                    await gate.acquire()
            except TimeoutError as error:
                raise TransferError(f"other reads of engine {engine_id} took all the time", reason="timeout") from error
        try:
            deadline = until()

            def job() -> bool:
                left = deadline - self._clock()
                if left <= 0:
                    raise TransferError("no thread was free in time", reason="timeout")
                return self._transport.read(
                    engine_id, remote_blocks, local_blocks, timeout=left, cancel=cancel, lease=lease
                )

            return await self._read_pool.run(job, cancel)
        except TransferError as error:
            if error.reason in ("timeout", "wedged", "disconnected"):
                self._verified.discard(engine_id)  # the next pull asks over HTTP first, which fails sooner
            raise
        finally:
            gate.release()

    def _handshake_ended(self, key: tuple[str, int], task: asyncio.Task[str]) -> None:
        self._handshakes.pop(key, None)
        if not task.cancelled():
            task.exception()  # taken: those who still wait got it, and nobody may be left

    async def _handshake(self, host: str, port: int) -> str:
        theirs = await self._peers.handshake(host, port, timeout=HANDSHAKE_SECONDS)
        self._check(theirs, f"{host}:{port}")
        key = (host, port)
        before = self._engines.get(key)
        if before is not None and before != theirs.engine_id:
            await self._forget(before)
        await self._connect_pool.run(lambda: self._transport.add_peer(theirs))
        self._engines[key] = theirs.engine_id
        self._engines.move_to_end(key)
        self._verified.add(theirs.engine_id)
        while len(self._engines) > MAX_PEERS:
            _, oldest = self._engines.popitem(last=False)
            await self._forget(oldest)
        return theirs.engine_id

    def _check(self, theirs: Handshake, where: str) -> None:
        """Raise TransferError unless their blocks mean here what they mean there."""
        ours = self._identity
        who = f"engine {theirs.engine_id} at {where}"
        if theirs.compat_hash != self._hash or theirs.compatibility != ours.compatibility:
            difference = differences(ours.compatibility, theirs.compatibility) or "all fields equal"
            raise TransferError(
                f"{who} has KV compatibility hash {theirs.compat_hash}, this engine {self._hash} ({difference}): "
                "its blocks can't be read; pair workers of one kind only",
                reason="incompatible",
            )
        if theirs.transport != ours.transport:
            raise TransferError(
                f"{who} uses transport {theirs.transport}, this engine {ours.transport}: both must use the same",
                reason="incompatible",
            )
        if theirs.engine_id == ours.engine_id:
            raise TransferError(f"{who} is this engine itself", reason="refused")

    async def _forget(self, engine_id: str) -> None:
        self._verified.discard(engine_id)
        self._gates.pop(engine_id, None)
        with contextlib.suppress(TransferError):
            await self._connect_pool.run(lambda: self._transport.remove_peer(engine_id))
