"""Reads over an agent in our hands: what is given up, and when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from forebay_engine.kv.lease_words import LeaseMark
from forebay_engine.transfer import nixl
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.memory import HOST, Buffer, Place
from forebay_engine.transfer.nixl_agent import NixlAgent
from forebay_engine.transfer.nixl_reads import PIECE_BYTES, Peer, Reads
from forebay_engine.transfer.staging import MAX_SLOTS
from forebay_engine.transfer.ucx import ProtocolTable, Route
from forebay_wire.messages import Compatibility, Handshake

MEMORY_BYTES = 64 * 1024


class Table:
    def routes(self) -> list[Route]:
        return [Route("agent", 0, float("inf"), "zero-copy", "cma/memory")]

    def in_use(self) -> str:
        return "SharedMemory"


class Agent(NixlAgent):
    """Every request is a number, and in the state that `states` says."""

    def __init__(self) -> None:
        self.closed = False
        self.lock = threading.Lock()
        self.states: dict[int, str | Exception] = {}
        self.released: list[int] = []
        self.freed_lists: list[Any] = []
        self.used_after_free = 0
        self.first_state = "PROC"

    def metadata(self) -> bytes:
        return b""

    def add_remote(self, metadata: bytes) -> str:
        return "remote"

    def remove_remote(self, agent: str) -> None: ...

    def close(self) -> None: ...

    def deregister(self) -> None: ...

    def release_list(self, descriptors: Any) -> None:
        self.freed_lists.append(descriptors)

    def register(self, address: int, nbytes: int, place: Place = HOST) -> None: ...

    def describe(self, agent: str, address: int, width: int, places: int, place: Place = HOST) -> Any:
        return object()

    def progress(self) -> None: ...

    def prepare(self, target: Any, places: Any, source: Any, remote_places: Any) -> int:
        self.used_after_free += source in self.freed_lists
        handle = len(self.states)
        self.states[handle] = self.first_state
        return handle

    def state(self, handle: int) -> str:
        state = self.states[handle]
        if isinstance(state, Exception):
            raise state
        return state

    start = state

    def release(self, handle: int) -> None:
        self.released.append(handle)


@pytest.mark.parametrize("end", ["DONE", "ERR", RuntimeError("disconnected")])
def test_a_direct_read_given_up_is_in_doubt_until_its_last_request_is_over(end: str | Exception) -> None:
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += max(seconds, 1e-3)

    agent = Agent()
    memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
    reads = Reads(
        agent,
        address=memory.ctypes.data,
        block_bytes=PIECE_BYTES // 2,
        num_blocks=8,
        word_bytes=8,
        clock=lambda: now,
        sleep=sleep,
        table=cast(ProtocolTable, Table()),
    )
    reads.look_at_routes()
    peer = Peer("e", "agent", object(), 8, connected=0.0, proven=True)

    with pytest.raises(TransferError) as failure:
        reads.read(peer, [0, 1, 2, 3, 4], [3, 4, 5, 6, 7], now + 1.0, None)
    doubt = failure.value.unsettled
    assert doubt is not None
    assert len(agent.states) == len(peer.abandoned) == 2
    with pytest.raises(TransferError, match="hangs"):
        reads.read(peer, [0], [0], now + 1.0, None)

    seen = []
    for handle in list(agent.states):
        seen.append(doubt.over)
        agent.states[handle] = end
        with agent.lock:
            reads.settle(peer)
    assert (seen, doubt.over) == ([False, False], True)
    assert agent.released == [0, 1]
    assert not peer.abandoned


def test_a_peer_that_is_left_in_the_middle_of_a_read_keeps_its_descriptors_until_the_read_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent()
    monkeypatch.setattr(nixl, "NixlAgent", lambda name, transport, **options: agent)
    sleeps = 0

    def sleep(seconds: float) -> None:
        """Another read of the same peer hears first that the peer is gone."""
        nonlocal sleeps
        sleeps += 1
        transport.remove_peer("e")
        agent.states.update(dict.fromkeys(agent.states, "DONE"))

    block_bytes = 16 * 1024 * 1024  # one block a request
    memory = np.zeros(4 * block_bytes, dtype=np.uint8)
    transport = nixl.NixlTransport(
        address=memory.ctypes.data, block_bytes=block_bytes, num_blocks=4, keepalive=memory, sleep=sleep
    )
    owner = Handshake(
        engine_id="e",
        compatibility=Compatibility("v", "m", "float32", 1, 1, 64, 16, "l"),
        compat_hash="h",
        transport="auto",
        agent=b"",
        base_address=0,
        block_bytes=block_bytes,
        num_blocks=4,
    )
    agent.first_state = "DONE"
    transport.add_peer(owner)
    stale = transport._peers["e"]

    agent.first_state = "PROC"
    transport.read("e", [0, 1, 2], [1, 2, 3], timeout=10.0)

    assert sleeps
    assert agent.used_after_free == 0
    assert not transport.knows("e")
    transport.progress()
    assert stale.blocks in agent.freed_lists
    with pytest.raises(TransferError, match="handshake first"):  # a read that had looked the peer up before
        transport._reads.read(stale, [0], [0], float("inf"), None)
    assert agent.used_after_free == 0
    transport.close()


class Journal(Agent):
    """Notes the order of calls; the handle of a lease's word is 0, since it is made first."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[int] = []

    def start(self, handle: int) -> str:
        self.began.append(handle)
        return self.state(handle)


def reads_of(agent: Agent, memory: Any, sleep: Callable[[float], None] = lambda seconds: None) -> Reads:
    reads = Reads(
        agent,
        address=memory.ctypes.data,
        block_bytes=PIECE_BYTES,
        num_blocks=8,
        word_bytes=8,
        clock=lambda: 100.0,
        sleep=sleep,
        table=cast(ProtocolTable, Table()),
    )
    reads.look_at_routes()
    return reads


def test_a_leases_word_is_begun_only_once_every_block_has_landed() -> None:
    agent = Journal()
    waits: list[list[int]] = []

    def sleep(seconds: float) -> None:
        waits.append(list(agent.began))
        agent.states.update(dict.fromkeys(agent.began, "DONE"))

    reads = reads_of(agent, np.zeros(MEMORY_BYTES, dtype=np.uint8), sleep)
    peer = Peer("e", "agent", object(), 8, object(), 4, connected=0.0, proven=True)

    assert not reads.read(peer, [0, 1, 2], [3, 4, 5], 200.0, None, LeaseMark(6, 1))  # nothing came: another word

    assert agent.began[-1] == 0
    assert sorted(agent.began) == [0, 1, 2, 3]
    assert all(agent.states[handle] == "DONE" for handle in (1, 2, 3))
    assert waits[-1] == agent.began, "the word was waited for by itself"
    assert sorted(agent.released) == [0, 1, 2, 3]
    assert len(reads._words._free) == len(reads._words.made) == 1


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_word_that_was_not_begun_is_given_back_with_its_slot(how: str) -> None:
    agent, cancel = Journal(), threading.Event()
    reads = reads_of(agent, np.zeros(MEMORY_BYTES, dtype=np.uint8))
    peer = Peer("e", "agent", object(), 8, object(), 4, connected=0.0, proven=True)
    if how == "cancelled":
        cancel.set()
    else:
        agent.first_state = "ERR"

    with pytest.raises(TransferError):
        reads.read(peer, [0], [3], 200.0, cancel, LeaseMark(6, 1))

    assert 0 not in agent.began
    assert sorted(agent.released) == sorted(agent.states)
    assert len(reads._words._free) == len(reads._words.made) == 1
    assert (peer.reading, reads.begun, peer.abandoned) == (0, 0, [])


def test_an_owner_is_asked_when_peers_that_hang_keep_every_words_slot() -> None:
    agent = Journal()
    agent.first_state = "DONE"
    reads = reads_of(agent, np.zeros(MEMORY_BYTES, dtype=np.uint8))
    taken = [reads._words.take() for _ in range(MAX_SLOTS)]
    assert all(taken)
    peer = Peer("e", "agent", object(), 8, object(), 4, connected=0.0, proven=True)
    assert not reads.read(peer, [0], [3], 200.0, None, LeaseMark(6, 1))
    assert len(agent.began) == 1


@pytest.mark.parametrize("how", ["another failed", "delivery failed"])
def test_slots_of_pieces_that_landed_in_a_read_that_failed_are_given_back(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each would be lost for good: with the last of them gone, no peer could be read through staging any more."""
    agent = Agent()

    def sleep(seconds: float) -> None:
        agent.states.update({0: "DONE", 1: RuntimeError("disconnected") if how == "another failed" else "DONE"})

    reads = reads_of(agent, np.zeros(MEMORY_BYTES, dtype=np.uint8), sleep)

    def put(buffer: Buffer, blocks: Sequence[int]) -> None:
        raise MemoryError

    if how == "delivery failed":
        monkeypatch.setattr(reads._memory, "put", put)
    peer = Peer("e", "agent", object(), 8, connected=200.0)
    with pytest.raises((TransferError, MemoryError)):
        reads.read(peer, [0, 1, 2], [3, 4, 5], 200.0, None)
    assert len(reads.staging.made) == len(reads.staging._free) == 2
    assert sorted(agent.released) == [0, 1]
    assert (peer.reading, reads.begun, peer.abandoned) == (0, 0, [])
