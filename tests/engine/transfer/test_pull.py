"""Whole pulls between two real processes, over both transports: data, leases, restarts, hangs."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.transfer.arena import BLOCK_BYTES
from engine.transfer.owners import Owner, Reader, StartOwner, StartReader, until
from forebay_engine.core.commands import Command, ReserveBlocks
from forebay_engine.core.handle import CoreStats
from forebay_engine.core.reservations import Reservations
from forebay_engine.kv.lease_words import WORD_BYTES
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.nixl import NixlTransport
from forebay_engine.transfer.simulated import SimulatedTransport
from forebay_wire.messages import CompleteResponse, Handshake, LeaseRef, ReserveRequest

KINDS = ["auto", "tcp", "simulated"]


async def freed(owner: Owner, leases: list[list[int]]) -> dict[str, Any]:
    """The owner's state once it has got the blocks of these leases back, which may be after the pull's end."""
    state: dict[str, Any] = {}

    async def back() -> bool:
        state.update(await owner.call("state"))
        return bool(state["freed"] == leases)

    await until(back, f"the blocks {leases} are free again")
    return state


@pytest.mark.parametrize("kind", KINDS)
async def test_500_blocks_in_random_order_arrive_equal(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=1)
    order = random.Random(7)
    remote, local = order.sample(range(512), 500), order.sample(range(512), 500)
    source = await owner.grant("r", remote)

    result = await reader.service.pull(source, remote, local)

    assert result.ok, result.reason
    assert result.bytes == 500 * BLOCK_BYTES
    assert all(reader.arena.holds(mine, 1, theirs) for mine, theirs in zip(local, remote, strict=True))
    untouched = set(range(512)) - set(local)
    assert not any(reader.arena.blocks[block].any() for block in untouched)
    state = await freed(owner, [remote])
    assert state["held"] == 0
    assert state["expired"] == []
    expected = {"auto": {"SharedMemory", "TCP"}, "tcp": {"TCP"}, "simulated": {"Simulated"}}[kind]
    assert reader.transport.in_use() in expected  # auto falls back to TCP where processes may not read each other


@pytest.mark.parametrize("kind", KINDS)
async def test_pulls_at_once_share_one_handshake(kind: str, start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=2)
    sources = [await owner.grant(f"r{i}", list(range(i * 8, i * 8 + 8))) for i in range(12)]

    results = await asyncio.gather(*(reader.service.pull(s, s.block_ids, s.block_ids) for s in sources))

    assert [r.reason for r in results if not r.ok] == []
    assert all(reader.arena.holds(block, 2, block) for block in range(96))
    assert (await owner.call("state"))["handshakes"] == 1
    assert reader.service.warm_pairs == {owner.engine_id}
    assert reader.service.counters.transfers == 12


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lease_that_ran_out_is_discarded_and_its_blocks_are_quarantined(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind, lease=0.5), await start_reader(kind)
    await owner.call("fill", seed=3)
    source = await owner.grant("r", [4, 5])

    async def expired() -> bool:
        return (await owner.call("state"))["expired"] == [[4, 5]]

    await until(expired, "the owner quarantines the blocks")
    # The blocks are refilled for another request; the read itself can't notice.
    await owner.call("fill", seed=99, blocks=[4, 5])
    result = await reader.service.pull(source, [4, 5], [0, 1])

    assert not result.ok
    assert "lease_broken" in result.reason
    assert reader.service.counters.failures["lease_broken"] == 1
    assert (await owner.call("state"))["freed"] == []


@pytest.mark.parametrize("kind", KINDS)
async def test_heartbeats_keep_a_lease_far_beyond_its_length(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    """A request may wait for blocks longer than a lease lasts."""
    owner, reader = await start_owner(kind, lease=0.9), await start_reader(kind)
    await owner.call("fill", seed=4)
    source = await owner.grant("r", [1])
    reader.service.track(source)
    started = time.monotonic()

    async def three_leases_later() -> bool:
        assert (await owner.call("state"))["held"] == 1
        return time.monotonic() - started > 2.7

    await until(three_leases_later, "time passes")
    result = await reader.service.pull(source, [1], [2])

    assert result.ok, result.reason
    assert reader.arena.holds(2, 4, 1)


async def test_without_tracking_the_lease_ends(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner("simulated", lease=0.4), await start_reader("simulated")
    source = await owner.grant("r", [1])
    reader.service.track(source)
    reader.service.untrack("r")

    async def expired() -> bool:
        return (await owner.call("state"))["expired"] == [[1]]

    await until(expired, "the lease ends")


def before_the_word(reader: Reader, hook: Callable[[], None]) -> None:
    """Have `hook` run in the reading thread between the last block's landing and the look at the lease's word."""
    transport = reader.transport
    if isinstance(transport, SimulatedTransport):
        ask = transport._ask

        def hooked_ask(sock: Any, request: bytes, answer_bytes: int, deadline: float) -> bytes:
            if answer_bytes == WORD_BYTES:
                hook()
            return ask(sock, request, answer_bytes, deadline)

        transport._ask = hooked_ask  # type: ignore[method-assign]
    else:
        assert isinstance(transport, NixlTransport)
        read_word = transport._reads._read_word

        def hooked_read_word(*args: Any) -> None:
            hook()
            read_word(*args)

        transport._reads._read_word = hooked_read_word  # type: ignore[method-assign]


@pytest.mark.parametrize("event", ["expired", "cancelled", "restarted"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_read_is_discarded_when_the_lease_broke_before_the_look_at_its_word(
    kind: str, event: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    """The reader believes in a long lease (its clock was stopped, say), so that only the owner's words can tell."""
    owner, reader = await start_owner(kind, lease=0.5), await start_reader(kind, lease=60.0, pull_timeout=30.0)
    await owner.call("fill", seed=5)
    source = msgspec.structs.replace(await owner.grant("r", [7]), lease_seconds=60.0)
    landed, go = threading.Event(), threading.Event()

    def wait() -> None:
        landed.set()
        go.wait(30)

    before_the_word(reader, wait)
    pull = asyncio.create_task(reader.service.pull(source, [7], [0]))
    await until(landed.is_set, "the block has landed")
    assert reader.arena.holds(0, 5, 7)

    async def expired() -> bool:
        return (await owner.call("state"))["expired"] == [[7]]

    match event:
        case "expired":
            await until(expired, "the lease runs out")
        case "cancelled":
            await owner.call("cancel", request_id="r")
        case "restarted":
            await owner.restart()
    await owner.call("fill", seed=6, blocks=[7])  # someone else's now
    go.set()
    result = await pull

    assert not result.ok
    if event != "restarted":
        assert result.reason.startswith("lease_broken")
    assert reader.service.counters.transfers == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reader_that_slept_beyond_its_lease_does_not_even_look(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    """As under SIGSTOP in the middle of a read: no heartbeat went out, and its own clock says that it is too late."""
    owner, reader = await start_owner(kind, lease=1.2), await start_reader(kind)
    source = await owner.grant("r", [7])
    await reader.service.warm("127.0.0.1", owner.port)
    slept = threading.Event()

    def sleep() -> None:
        asyncio.run_coroutine_threadsafe(frozen(), loop)
        time.sleep(1.6)
        slept.set()

    async def frozen() -> None:
        slept.wait(5)  # blocks the loop on purpose: the whole process stands still

    loop = asyncio.get_running_loop()
    before_the_word(reader, sleep)
    result = await reader.service.pull(source, [7], [0])

    assert not result.ok
    assert result.reason.startswith(("timeout", "lease_broken"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_standing_lease_is_seen_without_asking_the_owner(
    kind: str, start_owner: StartOwner, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=1)
    source = await owner.grant("r", [1])
    await reader.service.warm("127.0.0.1", owner.port)
    told = asyncio.Event()
    complete = reader.service._peers.complete

    async def late(*args: Any, **options: Any) -> CompleteResponse:
        await told.wait()
        return await complete(*args, **options)

    monkeypatch.setattr(reader.service._peers, "complete", late)
    result = await asyncio.wait_for(reader.service.pull(source, [1], [2]), 5)

    assert result.ok, result.reason
    assert reader.arena.holds(2, 1, 1)
    assert (await owner.call("state"))["held"] == 1
    told.set()
    await freed(owner, [[1]])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_owner_without_lease_words_is_asked(
    kind: str, start_owner: StartOwner, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM-shaped worker, say."""
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=1)
    handshake = reader.service._peers.handshake

    async def wordless(*args: Any, **options: Any) -> Handshake:
        return msgspec.structs.replace(await handshake(*args, **options), words_address=0, num_words=0)

    monkeypatch.setattr(reader.service._peers, "handshake", wordless)
    result = await reader.service.pull(await owner.grant("r", [1]), [1], [2])

    assert result.ok, result.reason
    assert reader.arena.holds(2, 1, 1)
    assert (await owner.call("state"))["freed"] == [[1]]  # with the answer
    broken = await owner.grant("s", [2])
    await owner.call("cancel", request_id="s")
    result = await reader.service.pull(broken, [2], [3])
    assert result.reason.startswith("lease_broken")


async def test_the_reader_gives_up_before_the_lease_ends(start_owner: StartOwner, start_reader: StartReader) -> None:
    """Heartbeats get no answer (the owner hangs), so the lease's end by the reader's own clock stops the read."""
    owner = await start_owner("simulated", lease=1.2)
    reader = await start_reader("simulated", bandwidth=BLOCK_BYTES / 30.0)  # a block would take 30 s
    source = await owner.grant("r", [7])
    await reader.service.warm("127.0.0.1", owner.port)
    owner.pause()

    result = await reader.service.pull(source, [7], [0])

    owner.resume()
    assert not result.ok
    assert result.reason.startswith("timeout")
    assert result.seconds < 1.2


@pytest.mark.parametrize("kind", KINDS)
async def test_complete_counts_once(kind: str, start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    source = await owner.grant("r", [1, 2])
    assert (await reader.service.pull(source, [1, 2], [1, 2])).ok

    await freed(owner, [[1, 2]])
    again = await reader.service.pull(source, [1, 2], [1, 2])

    assert not again.ok
    assert "lease_broken" in again.reason
    assert (await owner.call("state"))["freed"] == [[1, 2]]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_lease_is_discarded(kind: str, start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    source = await owner.grant("r", [1, 2])
    await owner.call("cancel", request_id="r")

    result = await reader.service.pull(source, [1, 2], [1, 2])

    assert not result.ok
    assert (await owner.call("state"))["freed"] == [[1, 2]]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_restarted_owner_is_noticed_and_its_new_engine_serves(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=1)
    assert (await reader.service.pull(await owner.grant("a", [1]), [1], [1])).ok
    lost = await owner.grant("b", [2])
    await owner.restart()
    await owner.call("fill", seed=2)

    gone = await reader.service.pull(lost, [2], [2])
    fresh = await reader.service.pull(await owner.grant("c", [3]), [3], [3])

    assert not gone.ok
    assert fresh.ok, fresh.reason
    assert reader.arena.holds(3, 2, 3)
    assert owner.engine_id in reader.service.warm_pairs


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_mid_transfer(kind: str, start_owner: StartOwner, start_reader: StartReader) -> None:
    big = 1024 * 1024
    owner = await start_owner(kind, blocks=200, block_bytes=big)
    reader = await start_reader(kind, blocks=200, block_bytes=big, bandwidth=400e6)
    source = await owner.grant("r", list(range(200)))
    await reader.service.warm("127.0.0.1", owner.port)
    pull = asyncio.create_task(reader.service.pull(source, range(200), range(200)))
    await asyncio.sleep(0)  # the read is handed to its thread
    owner.kill()

    result = await asyncio.wait_for(pull, 10)

    assert not result.ok
    assert result.seconds < 5
    assert result.unsettled is None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hanging_owner_costs_no_more_than_the_timeout_and_serves_again_afterwards(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind, pull_timeout=1.0)
    await owner.call("fill", seed=6)
    assert (await reader.service.pull(await owner.grant("a", [1]), [1], [1])).ok
    first = await owner.grant("b", [2])
    owner.pause()

    result = await asyncio.wait_for(reader.service.pull(first, [2], [2]), 10)

    # The kernel may copy out of a stopped process (shared memory): its blocks stand still, and so do its words.
    assert not result.ok or (kind == "auto" and reader.arena.holds(2, 6, 2))
    assert result.seconds < 1.0 + 2.0 + 1.0  # the read's timeout, the confirmation's, and a second for a slow machine
    owner.resume()

    async def served() -> bool:
        # Each try has a lease of its own: a pull that fails gives its lease back.
        again = await reader.service.pull(await owner.grant("c", [3]), [3], [3])
        return again.ok

    await until(served, "the owner serves again")
    assert reader.arena.holds(3, 6, 3)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hanging_owner_fails_the_first_contact_in_time(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind, pull_timeout=1.0)
    source = await owner.grant("r", [2])
    owner.pause()

    result = await asyncio.wait_for(reader.service.pull(source, [2], [2]), 10)

    owner.resume()
    assert not result.ok
    assert result.seconds < 2.0


async def test_another_dtype_is_refused_with_both_values(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner("simulated", dtype="bfloat16"), await start_reader("simulated")
    with pytest.raises(TransferError, match="dtype: float32 here, bfloat16 there"):
        await reader.service.warm("127.0.0.1", owner.port)

    result = await reader.service.pull(await owner.grant("r", [1]), [1], [1])
    assert not result.ok
    assert result.reason.startswith("incompatible")


async def test_a_wrong_token_is_refused(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner("simulated"), await start_reader("simulated")
    reader.service._peers._headers = {"authorization": "Bearer wrong"}
    result = await reader.service.pull(await owner.grant("r", [1]), [1], [1])
    assert not result.ok
    assert "HTTP 401" in result.reason


async def test_an_aborted_pull_ends_at_once(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner = await start_owner("simulated")
    reader = await start_reader("simulated", bandwidth=BLOCK_BYTES / 30.0)
    await reader.service.warm("127.0.0.1", owner.port)
    source = await owner.grant("r", [1])
    started = time.monotonic()
    pull = asyncio.create_task(reader.service.pull(source, [1], [1]))
    await asyncio.sleep(0)
    reader.service.untrack("r")

    result = await pull

    assert not result.ok
    assert result.reason.startswith("cancelled")
    assert time.monotonic() - started < 1.0
    await freed(owner, [[1]])


async def _follow(reader: Reader, owner: Owner, local: list[int], ttl: float = 10.0) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    reserve = ReserveRequest(
        request_id="r", prefill_host="127.0.0.1", prefill_port=owner.port, prompt_tokens=64, ttl_seconds=ttl
    )
    await reader.service.follow(reserve, local, lambda _, epoch, count, coming: seen.append((epoch, count)))
    return seen


@pytest.mark.parametrize("kind", KINDS)
async def test_chunks_are_read_while_the_prefill_runs(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=8)
    following = asyncio.create_task(_follow(reader, owner, [10, 11, 12, 13]))
    await owner.call("begin", request_id="r")
    await owner.call("advance", request_id="r", blocks=[3, 1])
    await until(lambda: reader.arena.holds(11, 8, 1), "the first chunk arrives while the prefill runs")
    await owner.call("advance", request_id="r", blocks=[3, 1, 4])
    answer = await owner.call("grant", request_id="r", blocks=[3, 1, 4, 5], num_tokens=60)  # the last is partly filled
    seen = await asyncio.wait_for(following, 10)

    epoch = answer["epoch"]
    assert seen[0] == (epoch, 0)
    assert (epoch, 2) in seen
    assert seen[-1] == (epoch, 3)
    assert [reader.arena.holds(m, 8, t) for m, t in ((10, 3), (11, 1), (12, 4))] == [True] * 3
    source = owner.source("r", [3, 1, 4, 5], epoch)
    result = await reader.service.pull(source, [5], [13])
    assert result.ok, result.reason
    assert reader.arena.holds(13, 8, 5)
    await freed(owner, [[3, 1, 4, 5]])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_preempted_prefill_voids_what_was_read_ahead(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=8)
    await owner.call("begin", request_id="r")
    await owner.call("advance", request_id="r", blocks=[1, 2])
    seen: list[tuple[int, int]] = []
    reserve = ReserveRequest(
        request_id="r", prefill_host="127.0.0.1", prefill_port=owner.port, prompt_tokens=64, ttl_seconds=10
    )
    following = asyncio.create_task(
        reader.service.follow(reserve, [10, 11, 12], lambda _, epoch, count, coming: seen.append((epoch, count)))
    )
    await until(lambda: bool(seen) and seen[-1][1] == 2, "two blocks are read")
    first_epoch = seen[-1][0]
    await owner.call("restart", request_id="r")
    await owner.call("fill", seed=9, blocks=[1, 2])  # someone else's now
    await until(lambda: seen[-1] == (seen[-1][0], 0) and seen[-1][0] != first_epoch, "the reader starts over")
    await owner.call("advance", request_id="r", blocks=[6, 7])
    answer = await owner.call("grant", request_id="r", blocks=[6, 7], num_tokens=32)
    await asyncio.wait_for(following, 10)

    assert seen[-1] == (answer["epoch"], 2)
    assert reader.arena.holds(10, 8, 6)
    assert reader.arena.holds(11, 8, 7)
    # A lease of the old epoch never confirms.
    stale = await reader.service.pull(owner.source("r", [1, 2], first_epoch), [], [])
    assert not stale.ok
    assert (await reader.service.pull(owner.source("r", [6, 7], answer["epoch"]), [], [])).ok


async def test_following_ends_when_the_prefill_is_dropped(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner("simulated"), await start_reader("simulated")
    await owner.call("begin", request_id="r")
    await owner.call("advance", request_id="r", blocks=[1])
    following = asyncio.create_task(_follow(reader, owner, [10, 11]))
    await until(lambda: bool(reader.service.counters.totals), "one block is read")
    await owner.call("cancel", request_id="r")
    assert (await asyncio.wait_for(following, 5))[-1][1] == 1


async def test_following_nothing_ends_with_its_time(start_owner: StartOwner, start_reader: StartReader) -> None:
    owner, reader = await start_owner("simulated"), await start_reader("simulated")
    started = time.monotonic()
    assert await _follow(reader, owner, [10], ttl=0.3) == []
    assert time.monotonic() - started < 1.5


async def test_heartbeat_names_what_is_gone(start_reader: StartReader) -> None:
    reader = await start_reader("simulated")
    epoch = reader.leases.begin("a")
    reader.leases.grant("a", [1], 16, time.monotonic())
    answer = reader.service.heartbeat(
        [LeaseRef(request_id="a", epoch=epoch), LeaseRef(request_id="b", epoch=1), LeaseRef(request_id="a", epoch=99)]
    )
    assert answer.extended == ["a"]
    assert answer.gone == ["b", "a"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_owner_that_ends_in_order_exits_with_0(
    kind: str, start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    assert (await reader.service.pull(await owner.grant("r", [1]), [1], [1])).ok
    assert owner.stop() == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pair_is_warmed_up_by_the_first_reservation_even_a_refused_one(
    kind: str, start_owner: StartOwner, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = await start_owner(kind), await start_reader(kind)
    await owner.call("fill", seed=1)

    def no_room(command: Command) -> None:
        if isinstance(command, ReserveBlocks):
            command.reply(None)

    reservations = Reservations(reader.service, no_room)
    reserve = ReserveRequest("r", "127.0.0.1", owner.port, prompt_tokens=64, ttl_seconds=10)
    assert not (await reservations.reserve(reserve)).admitted
    await until(lambda: reader.service.warm_pairs == {owner.engine_id}, "the pair is warm")

    def paid_for_again(*_: Any, **__: Any) -> Any:
        raise AssertionError("the pull pays for the warm-up")

    monkeypatch.setattr(reader.service._peers, "handshake", paid_for_again)
    monkeypatch.setattr(reader.transport, "add_peer", paid_for_again)
    assert not (await reservations.reserve(reserve)).admitted  # a known pair costs nothing more
    result = await reader.service.pull(await owner.grant("r", [1]), [1], [2])

    assert result.ok, result.reason
    assert reader.arena.holds(2, 1, 1)


async def test_a_switch_of_transport_moves_no_bytes_from_one_series_to_another(
    start_owner: StartOwner, start_reader: StartReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = await start_owner("simulated"), await start_reader("simulated")
    for name, blocks in (("TCP", [1, 2]), ("RDMA", [3])):
        monkeypatch.setattr(reader.service._puller, "_in_use", lambda name=name: name)
        assert (await reader.service.pull(await owner.grant(name, blocks), blocks, blocks)).ok
    broken = await owner.grant("broken", [4])
    await owner.call("cancel", request_id="broken")
    assert not (await reader.service.pull(broken, [4], [4])).ok

    stats = reader.service.fill(CoreStats())

    assert {name: (t.bytes // BLOCK_BYTES, t.failures) for name, t in stats.transfers.items()} == {
        "TCP": (2, 0),
        "RDMA": (1, 1),
    }
    assert stats.transfer_bytes == 3 * BLOCK_BYTES


async def test_an_owner_is_told_of_its_blocks_even_by_a_reader_that_ends(
    start_owner: StartOwner, start_reader: StartReader
) -> None:
    owner, reader = await start_owner("simulated"), await start_reader("simulated")
    assert (await reader.service.pull(await owner.grant("r", [1]), [1], [1])).ok
    await reader.service.stop()
    assert (await owner.call("state"))["freed"] == [[1]]
