"""Reads over an agent in our hands: what is given up, and when it is over."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest

from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.nixl_agent import NixlAgent
from forebay_engine.transfer.nixl_reads import Peer, Reads
from forebay_engine.transfer.ucx import ProtocolTable, Route

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

    def register(self, address: int, nbytes: int) -> None: ...

    def describe(self, agent: str, address: int, width: int, places: int) -> Any:
        return object()

    def progress(self) -> None: ...

    def prepare(self, *_: Any) -> int:
        handle = len(self.states)
        self.states[handle] = "PROC"
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
        block_bytes=16 * 1024 * 1024,  # two blocks a request
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
