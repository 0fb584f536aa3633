"""Heartbeats by an injected clock: when they go out, and what their answers mean."""

from __future__ import annotations

import asyncio

import pytest

from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.lease_keeper import LeaseKeeper, margin
from forebay_engine.types import PullSource
from forebay_wire.messages import HeartbeatResponse, LeaseRef


def source(request_id: str, port: int = 1, lease: float = 30.0, epoch: int = 1) -> PullSource:
    return PullSource(
        engine_id="e",
        request_id=request_id,
        host="h",
        port=port,
        block_ids=[],
        num_tokens=0,
        epoch=epoch,
        compat_hash="",
        lease_seconds=lease,
    )


class Owners:
    """Answers heartbeats; `hold` keeps a port's answers back."""

    def __init__(self) -> None:
        self.now = 100.0
        self.heard: list[tuple[int, list[str]]] = []
        self.gone: set[str] = set()
        self.down: set[int] = set()
        self.hold: dict[int, asyncio.Event] = {}

    def clock(self) -> float:
        return self.now

    async def send(self, host: str, port: int, leases: list[LeaseRef], *, timeout: float) -> HeartbeatResponse:
        self.heard.append((port, sorted(ref.request_id for ref in leases)))
        if port in self.hold:
            await self.hold[port].wait()
        if port in self.down:
            raise TransferError("down", reason="peer_unreachable")
        ids = [ref.request_id for ref in leases]
        return HeartbeatResponse(
            extended=[i for i in ids if i not in self.gone], gone=[i for i in ids if i in self.gone]
        )


async def beat(keeper: LeaseKeeper) -> None:
    keeper._beat()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_request_a_peer_every_sixth_of_the_lease() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    for request_id, port in (("a", 1), ("b", 1), ("c", 2)):
        keeper.track(source(request_id, port))
    await beat(keeper)
    assert owners.heard == []
    owners.now += 5.0
    await beat(keeper)
    assert sorted(owners.heard) == [(1, ["a", "b"]), (2, ["c"])]
    owners.now += 4.9
    await beat(keeper)
    assert len(owners.heard) == 2
    keeper.untrack("c")
    owners.now += 0.2
    await beat(keeper)
    assert owners.heard[2:] == [(1, ["a", "b"])]


async def test_a_lease_is_counted_from_when_the_heartbeat_was_sent() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    tracked = keeper.track(source("a"))
    assert tracked.ends == 130.0
    owners.hold[1] = asyncio.Event()
    owners.now = 106.0
    await beat(keeper)
    owners.now = 109.0  # the answer takes three seconds
    owners.hold[1].set()
    await beat(keeper)
    assert tracked.ends == 136.0


async def test_no_answer_extends_nothing_and_is_tried_again() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    tracked = keeper.track(source("a"))
    owners.down.add(1)
    for _ in range(3):
        owners.now += 5.0
        await beat(keeper)
    assert len(owners.heard) == 3
    assert tracked.ends == 130.0
    owners.down.clear()
    await beat(keeper)
    assert tracked.ends == 145.0


async def test_a_peer_that_hangs_delays_no_other_and_gets_one_request_at_a_time() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    slow, quick = keeper.track(source("a", 1)), keeper.track(source("b", 2))
    owners.hold[1] = asyncio.Event()
    for _ in range(3):
        owners.now += 5.0
        await beat(keeper)
    assert [port for port, _ in owners.heard].count(1) == 1
    assert [port for port, _ in owners.heard].count(2) == 3
    assert quick.ends == 145.0
    assert slow.ends == 130.0
    owners.hold[1].set()
    await beat(keeper)


async def test_a_lease_given_up_as_its_heartbeat_begins_is_not_sent() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    keeper.track(source("a"))
    owners.now += 5.0
    keeper._beat()
    (beating,) = keeper._tasks
    keeper.untrack("a")
    await beating
    assert owners.heard == []
    keeper.track(source("b"))
    owners.now += 5.0
    await beat(keeper)
    assert owners.heard == [(1, ["b"])], "the peer is not taken for busy"


async def test_what_the_owner_does_not_know_is_gone_and_asked_no_more() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    tracked = keeper.track(source("a"))
    owners.gone.add("a")
    for _ in range(3):
        owners.now += 5.0
        await beat(keeper)
    assert tracked.gone
    assert len(owners.heard) == 1


async def test_tracking_again_keeps_the_lease_and_another_epoch_replaces_it() -> None:
    owners = Owners()
    keeper = LeaseKeeper(owners.send, owners.clock)
    first = keeper.track(source("a"))
    assert keeper.track(source("a")) is first
    second = keeper.track(source("a", epoch=2))
    assert second is not first
    assert len(keeper) == 1


@pytest.mark.parametrize(("lease", "expected"), [(30.0, 5.0), (60.0, 5.0), (6.0, 1.0), (0.6, 0.1)])
def test_margin(lease: float, expected: float) -> None:
    assert margin(lease) == pytest.approx(expected)
