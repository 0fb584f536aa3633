"""Reads of a peer by NIXL: piece by piece, with a deadline, and given up in a way that nothing lands later.

Facts this is built on, all measured with NIXL 1.5: over cma (same host) the copy happens inside the call that starts a
request; a peer that hangs never raises; neighbouring blocks are merged into one descriptor by NIXL itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay_engine.kv.lease_words import LeaseMark
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.memory import ArenaMemory, HostMemory
from forebay_engine.transfer.nixl_agent import OURSELVES, NixlAgent, calling, failure
from forebay_engine.transfer.staging import Slot, Staging
from forebay_engine.transfer.ucx import ProtocolTable
from forebay_engine.types import UnsettledRead

log = logging.getLogger(__name__)

PIECE_BYTES = 96 * 1024 * 1024
"""One NIXL request: over cma a request is one uninterruptible copy under the lock, about 11 ms of it. That is less than
progress.IDLE_SECONDS, which a peer that connects meanwhile may wait for anyway. Each border of pieces costs 0.1 ms."""

WINDOW = 2
"""Requests of one read in flight, where the transport works in the background."""

SETTLE_SECONDS = {"RDMA": 15.0, "SharedMemory": 1.0}
"""How long a given-up direct read is waited for. RDMA: a NIC gives up a dead node in about 8 s (UCX defaults). Shared
memory: our own thread copies, so it ends at once or waits for a peer that hangs."""

ANSWER_SECONDS = 2.0
"""How long a read waits for given-up ones of the same peer before it calls the peer hung. A read ahead is given up when
the pull of its request begins: over TCP the peer has mostly not answered it yet, and does in some milliseconds."""

DIRECT_AFTER_SECONDS = 1.0
"""A peer is read straight into the arena once a read begun this long after its first one has succeeded through staging.
Before, its connection may not be complete although reads succeed, and a peer that hangs then leaves a read that neither
ends nor can be called back. (That stays possible later: UCX flushes all lanes of a peer after a read, and 1 in 15 reads
of a stopped process waited for it, measured. See TransferError.unsettled.)"""


@dataclass(eq=False, slots=True)
class Peer:
    engine_id: str
    agent: str
    blocks: Any
    """Descriptors of its blocks, one each."""

    num_blocks: int
    words: Any = None
    """Descriptors of its lease words, one each; None: it has none."""

    num_words: int = 0
    connected: float = math.inf
    """When its first read succeeded."""

    proven: bool = False
    """Its connection is complete, see DIRECT_AFTER_SECONDS."""

    abandoned: list[Request] = field(default_factory=list)
    """Given-up requests that UCX has not finished yet."""

    reading: int = 0
    """Reads under way: NIXL's descriptors, which it does not check, must outlive them."""

    unloaded: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.abandoned or self.reading)


Indices = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Piece:
    """What one NIXL request reads."""

    source: Any
    places: Indices
    """Of `source`."""

    landing: Indices
    """Where they land: of the arena's blocks, or of a slot's places."""

    staging: Staging | None = None
    """None: it lands in the arena directly."""

    deliver: Callable[[Slot], None] = lambda slot: None
    """Takes it out of its slot."""


@dataclass(eq=False, slots=True)
class Request:
    handle: Any
    piece: Piece
    slot: Slot | None = None
    started: bool = False
    doubt: UnsettledRead | None = None
    """Set when it was given up and may land in the arena."""


class Reads:
    """Thread-safe. `begun` reads have not ended."""

    def __init__(
        self,
        agent: NixlAgent,
        *,
        address: int,
        block_bytes: int,
        num_blocks: int,
        word_bytes: int,
        memory: ArenaMemory | None = None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        table: ProtocolTable,
    ) -> None:
        self._agent = agent
        self._memory = memory or HostMemory(address, block_bytes)
        self._block_bytes = block_bytes
        self._clock = clock
        self._sleep = sleep
        self._table = table
        self._one_sided = False
        self.begun = 0
        place = self._memory.place
        self.arena = agent.describe(OURSELVES, address, block_bytes, num_blocks, place)
        self.staging = Staging(block_bytes, agent, place=place, allocate=self._memory.allocate)
        self._words = Staging(word_bytes, agent, slot_bytes=word_bytes)

    def read(
        self,
        peer: Peer,
        remote: Sequence[int],
        local: Sequence[int] | None,
        deadline: float,
        cancel: threading.Event | None,
        lease: LeaseMark | None = None,
    ) -> bool:
        """base.py: Transport.read. `local` None reads into a slot and drops it (warm-up)."""
        proving = not peer.proven and self._clock() >= peer.connected + DIRECT_AFTER_SECONDS
        requests: deque[Request] = deque()
        self._begin(peer, deadline, cancel, proving)
        word: Request | None = None
        found: list[int] = []
        try:
            if lease is not None:
                word = self._prepare_word(peer, lease, found)
            self._fetch(peer, self._pieces(peer, remote, local), requests, deadline, cancel)
            # Only now that every block has landed: the order is what makes the word say something about them.
            if word is not None:
                self._read_word(peer, word, requests, deadline, cancel)
            if proving:
                self.look_at_routes()
                peer.proven = True
            return lease is not None and found == [lease.word]
        except BaseException:
            self._abandon(peer, requests)
            raise
        finally:
            with self._agent.lock:
                if word is not None and not word.started:
                    self._end(word)
                self.begun -= 1
                peer.reading -= 1

    def direct(self, peer: Peer) -> bool:
        """Whether UCX reads without the peer's processor, so that a given-up read ends by itself."""
        return peer.proven and self._one_sided

    def look_at_routes(self) -> None:
        """UCX prints a route at the first read of a new kind of peer: no need to pay 0.1 ms at every read."""
        routes = self._table.routes()
        self._one_sided = bool(routes) and all(route.one_sided for route in routes)

    def settle(self, peer: Peer) -> None:
        """Take back what abandoned requests held, once UCX is done with them. Call under the lock."""
        for request in list(peer.abandoned):
            try:
                over = self._agent.state(request.handle) != "PROC"
            except Exception:  # it failed: over as well
                over = True
            if over:
                peer.abandoned.remove(request)
                self._end(request)
                doubt = request.doubt
                if doubt is not None and all(other.doubt is not doubt for other in peer.abandoned):
                    # Nothing lands any more: NIXL calls a request over when UCX has completed or failed each of its
                    # reads. Over cma our own thread copies, inside NIXL's calls; over RDMA a failed queue pair takes
                    # in no answer, and its reads are flushed before UCX reports them.
                    doubt.over = True

    def release(self) -> None:
        """Give the descriptor lists back. Call under the lock, when nothing reads."""
        self._agent.release_list(self.arena)
        for slot in (*self.staging.made, *self._words.made):
            self._agent.release_list(slot.descriptors)

    def _begin(self, peer: Peer, deadline: float, cancel: threading.Event | None, proving: bool) -> None:
        """Counts a read of the peer, once none that was given up is left."""
        give_up: float | None = None
        while True:
            with self._agent.lock:
                self._agent.check_open()
                if proving:  # what the peer sent for the set-up is taken in first: this read is to wait for the rest
                    self._agent.progress()
                if peer.abandoned:
                    self.settle(peer)
                if peer.unloaded:  # since the caller looked it up
                    raise TransferError(f"engine {peer.engine_id} was left: handshake first", reason="not_connected")
                if not peer.abandoned:
                    self.begun += 1
                    peer.reading += 1
                    return
            if cancel is not None and cancel.is_set():
                raise TransferError(f"read of engine {peer.engine_id} was cancelled", reason="cancelled")
            now = self._clock()
            if give_up is None:
                give_up = min(deadline, now + ANSWER_SECONDS)
            if now >= give_up:
                raise TransferError(
                    f"engine {peer.engine_id} has not answered an earlier read yet: it hangs", reason="wedged"
                )
            self._sleep(500e-6)

    def _pieces(self, peer: Peer, remote: Sequence[int], local: Sequence[int] | None) -> Iterator[Piece]:
        theirs = np.asarray(remote, dtype=np.int32)
        if local is not None and self.direct(peer):
            ours = np.asarray(local, dtype=np.int32)
            size = max(1, PIECE_BYTES // self._block_bytes)
            for start in range(0, len(theirs), size):
                yield Piece(peer.blocks, theirs[start : start + size], ours[start : start + size])
            return
        size = self.staging.places
        for start in range(0, len(theirs), size):
            blocks = () if local is None else local[start : start + size]
            places = theirs[start : start + size]
            landing = self.staging.indices[: len(places)]
            yield Piece(peer.blocks, places, landing, self.staging, self._into(blocks))

    def _into(self, blocks: Sequence[int]) -> Callable[[Slot], None]:
        return lambda slot: self._memory.put(slot.buffer, blocks)

    def _prepare_word(self, peer: Peer, lease: LeaseMark, found: list[int]) -> Request | None:
        """The request whose answer goes to `found`, made before the blocks are read: after them it would cost twice
        the time, with caches full of their bytes. None: the peer has no words, or too many peers hang (each keeps a
        slot), so that the owner is to be asked."""
        if peer.words is None:
            return None
        place = np.array([lease.epoch % peer.num_words], dtype=np.int32)
        piece = Piece(peer.words, place, self._words.indices, self._words, lambda slot: found.append(slot.number()))
        with self._agent.lock:
            return self._prepare(peer, piece)

    def _read_word(
        self,
        peer: Peer,
        word: Request,
        requests: deque[Request],
        deadline: float,
        cancel: threading.Event | None,
    ) -> None:
        """Once `requests` is empty: every block has landed."""
        self._go_on(peer, requests, deadline, cancel)
        with self._agent.lock:
            state = self._start(peer, word, requests)
        if state == "DONE":
            self._deliver(word)
        else:
            self._fetch(peer, (), requests, deadline, cancel)

    def _fetch(
        self,
        peer: Peer,
        pieces: Iterable[Piece],
        requests: deque[Request],
        deadline: float,
        cancel: threading.Event | None,
    ) -> None:
        """Returns when every piece has landed and was delivered; what is in flight is in `requests`."""
        left = iter(pieces)
        piece = next(left, None)
        idle = 0
        while piece is not None or requests:
            self._go_on(peer, requests, deadline, cancel, "" if piece is None else ", not all asked for")
            if piece is not None and len(requests) < WINDOW and self._post(peer, piece, requests):
                piece = next(left, None)
                idle = 0
            elif self._poll(requests):
                idle = 0
            else:
                self._sleep(min(20e-6 * 2**idle, 300e-6))
                idle = min(idle + 1, 5)

    def _go_on(
        self, peer: Peer, requests: deque[Request], deadline: float, cancel: threading.Event | None, rest: str = ""
    ) -> None:
        """Raises TransferError when the read is to end now."""
        if cancel is not None and cancel.is_set():
            raise TransferError(f"read of engine {peer.engine_id} was cancelled", reason="cancelled")
        if self._clock() >= deadline:
            raise TransferError(
                f"read of engine {peer.engine_id} took longer than it may; {len(requests)} requests unanswered{rest}",
                reason="timeout",
            )

    def _post(self, peer: Peer, piece: Piece, requests: deque[Request]) -> bool:
        """Start one request; False when no slot is free. One that is done at once is finished at once."""
        with self._agent.lock:
            request = self._prepare(peer, piece)
            if request is None:
                return False
            state = self._start(peer, request, requests)
        if state == "DONE":
            self._deliver(request)
        return True

    def _prepare(self, peer: Peer, piece: Piece) -> Request | None:
        """Under the lock: a request that has not begun; None when no slot is free."""
        self._agent.check_open()
        try:
            if piece.staging is None:
                return Request(self._agent.prepare(self.arena, piece.landing, piece.source, piece.places), piece)
            slot = piece.staging.take()
            if slot is None:
                return None
            try:
                handle = self._agent.prepare(slot.descriptors, piece.landing, piece.source, piece.places)
            except Exception:
                piece.staging.give_back(slot)
                raise
            return Request(handle, piece, slot)
        except TransferError:
            raise
        except Exception as error:
            raise failure(f"read engine {peer.engine_id}", error) from error

    def _start(self, peer: Peer, request: Request, requests: deque[Request]) -> str:
        """Under the lock: begin it. DONE or PROC; while it is not over it is in `requests`."""
        self._agent.check_open()
        request.started = True
        requests.append(request)
        try:
            return self._state(requests, request, self._agent.start)
        except TransferError:
            raise
        except Exception as error:
            raise failure(f"read engine {peer.engine_id}", error) from error

    def _poll(self, requests: deque[Request]) -> bool:
        """Look at every request in flight; True when one was finished."""
        landed: deque[Request] = deque()
        try:
            with self._agent.exclusive(), calling("wait for a read"):
                for request in list(requests):
                    if self._state(requests, request, self._agent.state) == "DONE":
                        landed.append(request)
            found = bool(landed)
            while landed:
                self._deliver(landed.popleft())
            return found
        finally:
            # Left over when another one failed: they are in `requests` no more, and nobody else knows of their slots.
            while landed:
                self._give_back(landed.popleft())

    def _state(self, requests: deque[Request], request: Request, ask: Callable[[Any], str]) -> str:
        """DONE or PROC; takes a request that is over out of `requests`, and raises when it failed."""
        state = "ERR"
        try:
            state = ask(request.handle)
        finally:
            if state == "DONE":
                requests.remove(request)
                self._agent.release(request.handle)  # its slot is given back by _deliver()
            elif state != "PROC":
                requests.remove(request)
                self._end(request)
        if state == "ERR":
            raise TransferError("NIXL reported an error without a cause", reason="backend")
        return state

    def _deliver(self, request: Request) -> None:
        try:
            if request.slot is not None:
                request.piece.deliver(request.slot)
        finally:
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        if request.slot is not None and request.piece.staging is not None:
            with self._agent.lock:
                request.piece.staging.give_back(request.slot)

    def _end(self, request: Request) -> None:
        """Under the lock: the request is over, and nobody wants what it brought."""
        self._agent.release(request.handle)
        if request.slot is not None and request.piece.staging is not None:
            request.piece.staging.give_back(request.slot)

    def _abandon(self, peer: Peer, requests: deque[Request]) -> None:
        """Give up what is in flight, in a way that nothing of it lands in the arena later."""

        def direct() -> list[Request]:
            return [request for request in requests if request.slot is None]

        wait = SETTLE_SECONDS.get(self._table.in_use(), 0.0) if direct() else 0.0
        give_up = self._clock() + wait
        while direct() and not self._agent.closed and self._clock() < give_up:
            with contextlib.suppress(TransferError):
                self._poll(requests)
            self._sleep(200e-6)
        stuck = direct()
        doubt = UnsettledRead()
        for request in stuck:
            request.doubt = doubt
        with self._agent.lock:
            peer.abandoned.extend(requests)
        if stuck:
            log.critical("a read of engine %s can be neither finished nor stopped", peer.engine_id)
            raise TransferError(
                f"a read of engine {peer.engine_id} can be neither finished nor stopped after {wait:.0f} s; "
                "its local blocks are set aside until the peer answers or is gone",
                reason="unsettled",
                unsettled=doubt,
            )
