"""NIXL over UCX: reads blocks of other processes' KV arenas (host memory).

Facts this is built on, all measured with NIXL 1.5: its progress thread spins a core, so there is none and the service
calls progress(); over cma (same host) the copy happens inside transfer(); the first read of a peer costs 10-50 ms, so
add_peer makes one; a peer that hangs never raises, so every wait has a deadline of its own; neighbouring blocks are
merged into one descriptor by NIXL itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay_engine.transfer.base import TransferError, check_blocks
from forebay_engine.transfer.staging import Slot, Staging
from forebay_engine.transfer.ucx import PROCESS, ProtocolTable
from forebay_wire.messages import Handshake

log = logging.getLogger(__name__)

PIECE_BYTES = 32 * 1024 * 1024
"""One NIXL request: over cma a request is one uninterruptible copy under the lock, about 5 ms of it."""

WINDOW = 2
"""Requests of one read in flight, where the transport works in the background."""

SETTLE_SECONDS = {"RDMA": 15.0, "SharedMemory": 1.0}
"""How long a given-up direct read is waited for. RDMA: a NIC gives up a dead node in about 8 s (UCX defaults). Shared
memory: our own thread copies, so it ends at once or waits for a peer that hangs."""

DIRECT_AFTER_SECONDS = 1.0
"""A peer is read straight into the arena once a read begun this long after its first one has succeeded through staging.
Before, its connection may not be complete although reads succeed, and a peer that hangs then leaves a read that neither
ends nor can be called back. (That stays possible later: UCX flushes all lanes of a peer after a read, and 1 in 15 reads
of a stopped process waited for it, measured. See TransferError.unsettled.)"""

MEMORY = "DRAM"


@dataclass(eq=False, slots=True)
class Peer:
    engine_id: str
    agent: str
    descriptors: Any
    num_blocks: int
    connected: float = math.inf
    """When its first read succeeded."""

    proven: bool = False
    """Its connection is complete, see DIRECT_AFTER_SECONDS."""

    abandoned: list[Request] = field(default_factory=list)
    """Given-up requests that UCX has not finished yet."""


@dataclass(eq=False, slots=True)
class Request:
    handle: Any
    local_blocks: Sequence[int]
    slot: Slot | None


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
        keepalive: object = None,
        connect_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Registers num_blocks x block_bytes bytes from `address`; `keepalive` owns them and is held until close.

        Raises ucx.TransportUnavailable, or TransferError when NIXL or its UCX backend can't start.
        """
        self._address = address
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._keepalive = keepalive
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._closed = False
        self._reading = 0
        self._one_sided = False
        self._peers: dict[str, Peer] = {}
        self._retiring: dict[str, Peer] = {}
        self._name = f"forebay-{uuid.uuid4().hex}"  # fresh per start: peers can't mistake it for its predecessor
        with PROCESS.starting(transport), self._calling("start NIXL with its UCX backend"):
            api = _import_nixl()
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            self._registered = [self._register_range(address, block_bytes * num_blocks)]
            self._arena = self._describe("NIXL_INIT_AGENT", address, num_blocks)
            self._metadata = bytes(self._agent.get_agent_metadata())
        self._table = ProtocolTable(PROCESS.log_file, self._name, block_bytes)
        self._staging = Staging(block_bytes, self._register_slot)

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
        with self._exclusive():
            if handshake.engine_id in self._peers:
                return
            peer = self._retiring.pop(handshake.engine_id, None) or self._load(handshake)
            self._peers[peer.engine_id] = peer
        try:
            # UCX decides how it reads a peer at the first read, so this one goes to a staging slot in any case.
            self._read(peer, [0], None, self._clock() + self._connect_timeout, None)
            peer.connected = self._clock()
            self._look_at_routes()
        except TransferError:
            self.remove_peer(peer.engine_id)
            raise

    def remove_peer(self, engine_id: str) -> None:
        with self._exclusive():
            peer = self._peers.pop(engine_id, None)
            if peer is not None:
                self._retire(peer)

    def read(
        self,
        engine_id: str,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
        cancel: threading.Event | None = None,
    ) -> None:
        peer = self._peers.get(engine_id)
        if peer is None:
            raise TransferError(f"engine {engine_id} is not connected: handshake first", reason="not_connected")
        check_blocks(remote_blocks, local_blocks, remote_total=peer.num_blocks, local_total=self._num_blocks)
        try:
            self._read(peer, remote_blocks, local_blocks, self._clock() + timeout, cancel)
        except TransferError as error:
            if error.reason == "disconnected":
                self.remove_peer(engine_id)
            raise

    def progress(self) -> None:
        # A read under way holds the lock and drives UCX itself.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._agent.get_new_notifs()  # the one call that drives UCX; nobody sends notifications
                self._settle()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Leaves every peer and gives the arena back. Reads under way must have ended, else the arena is kept for ever.

        The agent itself is never destroyed: UCX aborts the process when a peer hangs at that moment (an assertion on
        its queue of pending operations). It goes with the process, which has one transport.
        """
        with self._lock:
            if self._closed:
                return
            self._settle()
            self._closed = True
            _never_free(self._agent)
            if self._reading or any(peer.abandoned for peer in (*self._peers.values(), *self._retiring.values())):
                _never_free((self._keepalive, self._staging))
                return
            for peer in self._peers.values():
                self._unload(peer)
            self._peers.clear()
            with contextlib.suppress(Exception):
                for descriptors in (self._arena, *(slot.descriptors for slot in self._staging.made)):
                    self._agent.release_dlist_handle(descriptors)
                for region in self._registered:
                    self._agent.deregister_memory(region)
            self._keepalive = None

    # Reading

    def _read(
        self,
        peer: Peer,
        remote: Sequence[int],
        local: Sequence[int] | None,
        deadline: float,
        cancel: threading.Event | None,
    ) -> None:
        """Piece by piece; `local` None reads into a slot and drops it (warm-up)."""
        direct = local is not None and self._direct(peer)
        size = max(1, PIECE_BYTES // self._block_bytes) if direct else self._staging.blocks_per_slot
        proving = not peer.proven and self._clock() >= peer.connected + DIRECT_AFTER_SECONDS
        requests: deque[Request] = deque()
        start, idle = 0, 0
        with self._exclusive():
            if proving:  # what the peer sent for the set-up is taken in first: this read is to wait for the rest
                self._agent.get_new_notifs()
            self._settle()
            if peer.abandoned:
                raise TransferError(
                    f"engine {peer.engine_id} has not answered an earlier read yet: it hangs", reason="wedged"
                )
            self._reading += 1
        try:
            while start < len(remote) or requests:
                if cancel is not None and cancel.is_set():
                    raise TransferError(f"read of {len(remote)} blocks was cancelled", reason="cancelled")
                if self._clock() >= deadline:
                    raise TransferError(
                        f"read of {len(remote)} blocks from engine {peer.engine_id} took longer than it may; "
                        f"{start} were asked for, {len(requests)} requests unanswered",
                        reason="timeout",
                    )
                piece = slice(start, start + size)
                if (
                    start < len(remote)
                    and len(requests) < WINDOW
                    and self._post(peer, remote[piece], () if local is None else local[piece], direct, requests)
                ):
                    start += size
                    idle = 0
                elif self._poll(requests):
                    idle = 0
                else:
                    self._sleep(min(20e-6 * 2**idle, 300e-6))
                    idle = min(idle + 1, 5)
            if proving:
                self._look_at_routes()
                peer.proven = True
        except BaseException:
            self._abandon(peer, requests, direct)
            raise
        finally:
            with self._lock:
                self._reading -= 1

    def _direct(self, peer: Peer) -> bool:
        """Whether UCX reads without the peer's processor, so that a given-up read ends by itself."""
        return peer.proven and self._one_sided

    def _look_at_routes(self) -> None:
        """UCX prints a route at the first read of a new kind of peer: no need to pay 0.1 ms at every read."""
        routes = self._table.routes()
        self._one_sided = bool(routes) and all(route.one_sided for route in routes)

    def _post(
        self, peer: Peer, remote: Sequence[int], local: Sequence[int], direct: bool, requests: deque[Request]
    ) -> bool:
        """Start one request; False when no slot is free. One that is done at once is finished at once."""
        with self._exclusive(), self._calling(f"read engine {peer.engine_id}"):
            slot = None if direct else self._staging.take()
            if slot is None and not direct:
                return False
            target = self._arena if slot is None else slot.descriptors
            indices = np.asarray(local if slot is None else range(len(remote)), dtype=np.int32)
            try:
                handle = self._agent.make_prepped_xfer(
                    "READ", target, indices, peer.descriptors, np.asarray(remote, dtype=np.int32)
                )
            except Exception:
                if slot is not None:
                    self._staging.give_back(slot)
                raise
            request = Request(handle, local, slot)
            requests.append(request)
            state = self._state(requests, request, self._agent.transfer)
        if state == "DONE":
            self._deliver(request)
        return True

    def _poll(self, requests: deque[Request]) -> bool:
        """Look at every request in flight; True when one was finished."""
        finished = []
        with self._exclusive(), self._calling("wait for a read"):
            for request in list(requests):
                if self._state(requests, request, self._agent.check_xfer_state) == "DONE":
                    finished.append(request)
        for request in finished:
            self._deliver(request)
        return bool(finished)

    def _state(self, requests: deque[Request], request: Request, ask: Callable[[Any], str]) -> str:
        """DONE or PROC; takes a request that is over out of `requests`, and raises when it failed."""
        state = "ERR"
        try:
            state = ask(request.handle)
        finally:
            if state != "PROC":
                requests.remove(request)
                self._release(request)
                if state != "DONE" and request.slot is not None:
                    self._staging.give_back(request.slot)
        if state == "ERR":
            raise TransferError("NIXL reported an error without a cause", reason="backend")
        return state

    def _deliver(self, request: Request) -> None:
        if request.slot is not None:
            request.slot.copy_out(self._address, request.local_blocks)
            with self._lock:
                self._staging.give_back(request.slot)

    def _abandon(self, peer: Peer, requests: deque[Request], direct: bool) -> None:
        """Give up what is in flight, in a way that nothing of it lands in the arena later."""
        wait = SETTLE_SECONDS.get(self._table.in_use(), 0.0)
        give_up = self._clock() + wait
        while requests and direct and not self._closed and self._clock() < give_up:
            with contextlib.suppress(TransferError):
                self._poll(requests)
            self._sleep(200e-6)
        with self._lock:
            peer.abandoned.extend(requests)
        if requests and direct:
            log.critical("a read of engine %s can be neither finished nor stopped", peer.engine_id)
            raise TransferError(
                f"a read of engine {peer.engine_id} can be neither finished nor stopped after {wait:.0f} s; "
                "its local blocks are lost until this worker restarts",
                reason="unsettled",
                unsettled=True,
            )

    def _settle(self) -> None:
        """Take back what abandoned requests held, once UCX is done with them. Call under the lock."""
        for peer in (*self._peers.values(), *self._retiring.values()):
            for request in list(peer.abandoned):
                try:
                    over = self._agent.check_xfer_state(request.handle) != "PROC"
                except Exception:  # it failed: over as well
                    over = True
                if over:
                    peer.abandoned.remove(request)
                    self._release(request)
                    if request.slot is not None:
                        self._staging.give_back(request.slot)
        for peer in [peer for peer in self._retiring.values() if not peer.abandoned]:
            del self._retiring[peer.engine_id]
            self._unload(peer)

    # NIXL calls, all under the lock

    def _load(self, handshake: Handshake) -> Peer:
        with self._calling(f"connect to engine {handshake.engine_id}"):
            agent = self._agent.add_remote_agent(handshake.agent)
            agent = agent.decode() if isinstance(agent, bytes) else str(agent)
            try:
                descriptors = self._describe(agent, handshake.base_address, handshake.num_blocks)
            except Exception:
                self._agent.remove_remote_agent(agent)
                raise
            return Peer(handshake.engine_id, agent, descriptors, handshake.num_blocks)

    def _retire(self, peer: Peer) -> None:
        """Unload now, or when its abandoned requests are over: unloading would lose sight of them."""
        if peer.abandoned:
            self._retiring[peer.engine_id] = peer
        else:
            self._unload(peer)

    def _unload(self, peer: Peer) -> None:
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(peer.descriptors)
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(peer.agent)

    def _release(self, request: Request) -> None:
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(request.handle)

    def _describe(self, agent: str, address: int, blocks: int) -> Any:
        """One descriptor per block."""
        strided = np.array([[address, self._block_bytes, 0, self._block_bytes, blocks]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(agent, strided, MEMORY)

    def _register_range(self, address: int, length: int) -> Any:
        return self._agent.register_memory([(address, length, 0, "")], MEMORY)

    def _register_slot(self, memory: npt.NDArray[np.uint8], blocks: int) -> Any:
        self._registered.append(self._register_range(memory.ctypes.data, memory.nbytes))
        return self._describe("NIXL_INIT_AGENT", memory.ctypes.data, blocks)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed", reason="closed")
            yield

    @contextlib.contextmanager
    def _calling(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TransferError:
            raise
        except Exception as error:
            name = type(error).__name__
            if name == "nixlRemoteDisconnectError":
                reason = "disconnected"
            elif name in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
                reason = "refused"
            else:
                reason = "backend"
            raise TransferError(f"could not {doing}: {name}: {error}", reason=reason) from error


def _never_free(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _import_nixl() -> Any:
    try:
        import nixl_cu13._api as api
    except ImportError as error:
        raise TransferError(
            f"NIXL can't be imported ({error}); install forebay[engine], or choose the simulated transport",
            reason="backend",
        ) from error
    return api
