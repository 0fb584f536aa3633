"""NIXL itself between two real processes: refusals, hangs, and that nothing lands after a read was given up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from engine.transfer.arena import BLOCK_BYTES, Arena
from engine.transfer.owners import TOKEN, Owner, StartOwner, until
from forebay_engine.transfer import nixl_reads
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.nixl import NixlTransport
from forebay_engine.transfer.nixl_reads import DIRECT_AFTER_SECONDS
from forebay_engine.transfer.peers import PeerClient
from forebay_wire.messages import Handshake

KINDS = ["auto", "tcp"]
StartTransport = Callable[[str], tuple[Arena, NixlTransport]]


@pytest.fixture
async def start_transport() -> AsyncIterator[StartTransport]:
    made: list[NixlTransport] = []

    def start(kind: str) -> tuple[Arena, NixlTransport]:
        arena = Arena(kind, 512)
        transport = arena.transport()
        assert isinstance(transport, NixlTransport)
        made.append(transport)
        return arena, transport

    yield start
    for transport in made:
        transport.close()


async def handshake(owner: Owner) -> Handshake:
    peers = PeerClient(TOKEN)
    try:
        return await peers.handshake("127.0.0.1", owner.port, timeout=5)
    finally:
        await peers.close()


async def read(
    transport: NixlTransport, owner: Owner, remote: list[int], local: list[int], timeout: float = 5.0
) -> None:
    await asyncio.to_thread(transport.read, owner.engine_id, remote, local, timeout=timeout)


def settled(transport: NixlTransport) -> bool:
    transport.progress()
    return not any(peer.abandoned for peer in transport._known())


async def outcome(call: Awaitable[None]) -> str:
    """The reason it failed for, `ok` when it did not."""
    try:
        await call
    except TransferError as error:
        return error.reason
    return "ok"


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_lands_after_a_read_was_given_up(
    kind: str, start_owner: StartOwner, start_transport: StartTransport
) -> None:
    """Over TCP UCX delivers the answer as soon as the peer goes on, released or not: it must not reach the arena."""
    owner, (arena, transport) = await start_owner(kind), start_transport(kind)
    await owner.call("fill", seed=1)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    everything = list(range(512))
    owner.pause()

    given_up = await outcome(read(transport, owner, everything, everything, timeout=0.5))
    arena.blocks[:] = 7  # the blocks are someone else's now
    owner.resume()

    assert given_up in ("timeout", "ok") if kind == "auto" else given_up == "timeout"
    await until(lambda: settled(transport), "UCX is done with the given-up read")
    assert (arena.blocks == 7).all()
    await read(transport, owner, [5], [6])
    assert arena.holds(6, 1, 5)


async def test_a_hanging_peer_is_not_read_again_until_its_answer_came(
    start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner("tcp"), start_transport("tcp")
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    owner.pause()
    assert await outcome(read(transport, owner, [1], [1], timeout=0.3)) == "timeout"
    assert await outcome(read(transport, owner, [1], [1], timeout=0.3)) == "wedged"
    owner.resume()
    await until(lambda: settled(transport), "UCX is done with the given-up read")
    await read(transport, owner, [1], [1])


async def test_a_read_waits_for_one_that_was_given_up_a_moment_ago(
    start_owner: StartOwner, start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pull does that ends its own request's read ahead."""
    # On a loaded machine the owner may take longer than ANSWER_SECONDS to get a processor again.
    monkeypatch.setattr(nixl_reads, "ANSWER_SECONDS", 60.0)
    owner, (_, transport) = await start_owner("tcp"), start_transport("tcp")
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    owner.pause()
    assert await outcome(read(transport, owner, [1], [1], timeout=0.3)) == "timeout"
    second = asyncio.create_task(outcome(read(transport, owner, [1], [1], timeout=60.0)))
    done, _ = await asyncio.wait({second}, timeout=0.2)
    owner.resume()
    assert not done
    assert await second == "ok"


async def test_a_direct_read_of_a_stopped_peer_ends_or_says_that_its_blocks_are_in_doubt(
    start_owner: StartOwner, start_transport: StartTransport
) -> None:
    """Over shared memory the kernel mostly copies out of a stopped process, but UCX may wait for it as well."""
    owner, (arena, transport) = await start_owner("auto"), start_transport("auto")
    await owner.call("fill", seed=1)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    if transport.in_use() != "SharedMemory":
        pytest.skip("processes may not read each other's memory here: needs a shared pid namespace and ptrace rights")
    peer = transport._peers[owner.engine_id]
    await until(lambda: time.monotonic() > peer.connected + DIRECT_AFTER_SECONDS, "the connection is old enough")
    assert not transport._reads.direct(peer)
    await read(transport, owner, [1], [1])
    assert transport._reads.direct(peer)
    owner.pause()
    started = time.monotonic()
    everything = list(range(512))
    how = await outcome(read(transport, owner, everything, everything, timeout=0.5))
    assert how in ("ok", "unsettled")
    assert how != "ok" or all(arena.holds(block, 1, block) for block in everything)
    assert time.monotonic() - started < 5 * 1.5
    assert len(transport._reads.staging.made) == 1
    owner.resume()
    await until(lambda: settled(transport), "UCX is done with the given-up read")
    await read(transport, owner, [5], [6])
    assert arena.holds(6, 1, 5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hanging_peer_takes_a_bounded_number_of_slots(
    kind: str, start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner(kind), start_transport(kind)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    owner.pause()
    for _ in range(20):
        await outcome(read(transport, owner, [1], [1], timeout=0.01))
    assert len(transport._reads.staging.made) <= 3


@pytest.mark.parametrize("kind", KINDS)
async def test_a_peer_that_dies_is_forgotten(
    kind: str, start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner(kind), start_transport(kind)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    assert transport.knows(owner.engine_id)
    owner.kill()

    assert await outcome(read(transport, owner, [1], [1])) == "disconnected"
    assert not transport.knows(owner.engine_id)
    assert await outcome(read(transport, owner, [1], [1])) == "not_connected"


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_while_hanging_settles_what_was_given_up(
    kind: str, start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner(kind), start_transport(kind)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    owner.pause()
    await outcome(read(transport, owner, list(range(512)), list(range(512)), timeout=0.2))
    owner.kill()

    await until(lambda: settled(transport), "UCX notices the death")
    assert len(transport._reads.staging._free) == len(transport._reads.staging.made)


@pytest.mark.parametrize(
    ("remote", "local"),
    [([512], [0]), ([-1], [0]), ([0], [512]), ([0], [-1]), ([0, 1], [0]), ([0, 1], [3, 3])],
)
async def test_a_read_outside_the_arenas_is_refused_and_the_connection_lives(
    remote: list[int], local: list[int], start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (arena, transport) = await start_owner("auto"), start_transport("auto")
    await owner.call("fill", seed=2)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))

    assert await outcome(read(transport, owner, remote, local)) == "refused"
    assert not arena.blocks.any()
    await read(transport, owner, [511], [511])
    assert arena.holds(511, 2, 511)


@pytest.mark.parametrize(
    "lie",
    [
        {"num_blocks": 100_000},
        {"base_address": 4096},
        {"agent": b"not nixl metadata"},
        {"block_bytes": BLOCK_BYTES * 2},
        {"num_blocks": 0},
        {"words_address": 4096},
        {"num_words": 100_000},
    ],
)
async def test_a_handshake_that_does_not_fit_is_refused(
    lie: dict[str, object], start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner("auto"), start_transport("auto")
    honest = await handshake(owner)
    with pytest.raises(TransferError):
        await asyncio.to_thread(transport.add_peer, msgspec.structs.replace(honest, **lie))
    assert not transport.knows(owner.engine_id)
    await asyncio.to_thread(transport.add_peer, honest)
    await read(transport, owner, [1], [1])


async def test_a_cancelled_read_ends_before_its_deadline(
    start_owner: StartOwner, start_transport: StartTransport
) -> None:
    owner, (_, transport) = await start_owner("tcp"), start_transport("tcp")
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    owner.pause()
    cancel = threading.Event()
    running = asyncio.create_task(
        outcome(asyncio.to_thread(transport.read, owner.engine_id, [1], [1], timeout=60, cancel=cancel))
    )
    await asyncio.sleep(0)
    cancel.set()
    assert await asyncio.wait_for(running, 5) == "cancelled"


async def test_reads_of_many_threads_do_not_mix(start_owner: StartOwner, start_transport: StartTransport) -> None:
    owner, (arena, transport) = await start_owner("auto"), start_transport("auto")
    await owner.call("fill", seed=3)
    await asyncio.to_thread(transport.add_peer, await handshake(owner))
    parts = [list(range(i, 512, 8)) for i in range(8)]
    await asyncio.gather(*(read(transport, owner, part, [511 - b for b in part]) for part in parts))
    assert all(arena.holds(511 - block, 3, block) for block in range(512))


async def test_a_closed_transport_says_so(start_owner: StartOwner, start_transport: StartTransport) -> None:
    owner, (_, transport) = await start_owner("auto"), start_transport("auto")
    known = await handshake(owner)
    await asyncio.to_thread(transport.add_peer, known)
    transport.close()
    transport.close()
    transport.progress()
    with pytest.raises(TransferError, match="closed"):
        transport.add_peer(known)


_LONE = """
import ctypes, os, sys
from forebay_engine.core.processes import exit_now
from forebay_engine.transfer.nixl import NixlTransport
buffer = ctypes.create_string_buffer(1 << 20)
transport = NixlTransport(address=ctypes.addressof(buffer), block_bytes=1 << 16, num_blocks=16, keepalive=buffer)
assert transport.in_use() == "Unknown", transport.in_use()
assert not [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))], os.environ
print("alive", flush=True)
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("transport.close()", 0), ("exit_now(7)", 7)])
def test_a_process_with_nixl_ends_without_a_crash(ending: str, code: int) -> None:
    """Also: no peer yet means Unknown, and children inherit nothing of what UCX was told."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
    done = subprocess.run([sys.executable, "-c", _LONE + ending], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "alive\n"), done.stderr
