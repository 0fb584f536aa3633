"""NIXL over UCX: reads blocks of other processes' KV arenas, in host memory or in a GPU's.

Facts this is built on, all measured with NIXL 1.5: its progress thread spins a core, so there is none and the service
calls progress(); the first read of a peer costs 10-50 ms, so add_peer makes one. nixl_reads.py has the reads,
nixl_agent.py the calls.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from forebay_engine.kv.lease_words import WORD_BYTES, LeaseMark, LeaseWords
from forebay_engine.transfer.base import TransferError, check_blocks
from forebay_engine.transfer.memory import HOST, ArenaMemory, HostMemory, Place
from forebay_engine.transfer.nixl_agent import NixlAgent, calling, never_free
from forebay_engine.transfer.nixl_reads import Peer, Reads
from forebay_engine.transfer.ucx import PROCESS, ProtocolTable
from forebay_wire.messages import Handshake


class NixlTransport:
    """transfer/base.py: Transport. Thread-safe; NIXL is called under one lock, one call at a time."""

    needs_progress = True

    def __init__(
        self,
        *,
        address: int,
        block_bytes: int,
        num_blocks: int,
        transport: str = "auto",
        words: LeaseWords | None = None,
        keepalive: object = None,
        memory: ArenaMemory | None = None,
        connect_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Registers num_blocks x block_bytes bytes from `address`, which `keepalive` owns, and `words` for readers of
        our leases. Both are held until close. `memory` says where those bytes are; None: host memory.

        Raises ucx.TransportUnavailable, or TransferError when NIXL or its UCX backend can't start.
        """
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._words = words
        self._keepalive: tuple[object, ...] = (keepalive, words)
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._retiring: dict[str, Peer] = {}
        name = f"forebay-{uuid.uuid4().hex}"  # fresh per start: peers can't mistake it for its predecessor
        self._memory = memory or HostMemory(address, block_bytes)
        self._memory.enter()
        self._agent = NixlAgent(name, transport, cuda=self._memory.place.kind == "VRAM")
        self._agent.register(address, block_bytes * num_blocks, self._memory.place)
        if words is not None:
            self._agent.register(words.address, words.nbytes)
        self._metadata = self._agent.metadata()
        self._table = ProtocolTable(PROCESS.log_file, name, block_bytes, clock)
        self._reads = Reads(
            self._agent,
            address=address,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            word_bytes=WORD_BYTES,
            memory=self._memory,
            clock=clock,
            sleep=sleep,
            table=self._table,
        )

    def agent(self) -> bytes:
        return self._metadata

    def knows(self, engine_id: str) -> bool:
        return engine_id in self._peers

    def in_use(self) -> str:
        return self._table.in_use()

    def add_peer(self, handshake: Handshake) -> None:
        if handshake.block_bytes != self._block_bytes or handshake.num_blocks <= 0:
            raise TransferError(
                f"engine {handshake.engine_id} has {handshake.num_blocks} blocks of {handshake.block_bytes} bytes; "
                f"this one's have {self._block_bytes}: only equal blocks can be read",
                reason="refused",
            )
        self._memory.enter()
        with self._agent.exclusive():
            if handshake.engine_id in self._peers:
                return
            peer = self._retiring.pop(handshake.engine_id, None) or self._load(handshake)
            self._peers[peer.engine_id] = peer
        try:
            # UCX decides how it reads a peer at the first read, so this one goes to a staging slot in any case.
            self._reads.read(peer, [0], None, self._clock() + self._connect_timeout, None)
            peer.connected = self._clock()
            self._reads.look_at_routes()
        except TransferError:
            self.remove_peer(peer.engine_id)
            raise

    def remove_peer(self, engine_id: str) -> None:
        self._memory.enter()
        with self._agent.exclusive():
            peer = self._peers.pop(engine_id, None)
            if peer is not None:
                self._retiring[engine_id] = peer
            self._settle()

    def read(
        self,
        engine_id: str,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
        cancel: threading.Event | None = None,
        lease: LeaseMark | None = None,
    ) -> bool:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise TransferError(f"engine {engine_id} is not connected: handshake first", reason="not_connected")
        self._memory.enter()
        check_blocks(remote_blocks, local_blocks, remote_total=peer.num_blocks, local_total=self._num_blocks)
        try:
            return self._reads.read(peer, remote_blocks, local_blocks, self._clock() + timeout, cancel, lease)
        except TransferError as error:
            if error.reason == "disconnected":
                self.remove_peer(engine_id)
            raise

    def progress(self) -> None:
        self._memory.enter()
        # A read under way holds the lock and drives UCX itself.
        if not self._agent.lock.acquire(blocking=False):
            return
        try:
            if not self._agent.closed:
                self._agent.progress()
                self._settle()
        finally:
            self._agent.lock.release()

    def close(self) -> None:
        """Leaves every peer and gives the arena back. Reads under way must have ended, else the arena is kept for
        ever."""
        self._memory.enter()
        with self._agent.lock:
            if self._agent.closed:
                return
            self._settle()
            self._agent.close()
            if self._reads.begun or any(peer.abandoned for peer in self._known()):
                never_free((self._keepalive, self._reads))
                return
            if self._words is not None:
                self._words.close()  # while the blocks still are what the words say
            for peer in self._peers.values():
                self._unload(peer)
            self._peers.clear()
            self._reads.release()
            self._agent.deregister()
            self._keepalive = ()

    # Peers. Call these under the lock.

    def _known(self) -> tuple[Peer, ...]:
        return (*self._peers.values(), *self._retiring.values())

    def _settle(self) -> None:
        for peer in self._known():
            self._reads.settle(peer)
        # Unloading a busy one would lose sight of its requests, and free descriptors that a read goes on using.
        for peer in [peer for peer in self._retiring.values() if not peer.busy]:
            del self._retiring[peer.engine_id]
            self._unload(peer)

    def _load(self, handshake: Handshake) -> Peer:
        with calling(f"connect to engine {handshake.engine_id}"):
            agent = self._agent.add_remote(handshake.agent)
            try:
                place = Place(handshake.memory, handshake.device)
                blocks = self._describe(agent, handshake.base_address, self._block_bytes, handshake.num_blocks, place)
                words = self._describe(agent, handshake.words_address, WORD_BYTES, handshake.num_words, HOST)
            except Exception:
                self._agent.remove_remote(agent)
                raise
            return Peer(handshake.engine_id, agent, blocks, handshake.num_blocks, words, handshake.num_words)

    def _describe(self, agent: str, address: int, width: int, places: int, place: Place) -> Any:
        return self._agent.describe(agent, address, width, places, place) if places > 0 else None

    def _unload(self, peer: Peer) -> None:
        peer.unloaded = True
        for descriptors in (peer.blocks, peer.words):
            if descriptors is not None:
                self._agent.release_list(descriptors)
        self._agent.remove_remote(peer.agent)
