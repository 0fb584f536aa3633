"""The twin alone: one-sided semantics, faked time, bounds."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.transfer.arena import BLOCK_BYTES, Arena, compatibility
from forebay_engine.transfer import simulated
from forebay_engine.transfer.base import TransferError
from forebay_engine.transfer.simulated import SimulatedTransport
from forebay_wire.messages import Handshake
from forebay_wire.ports import TRANSFER_FIRST, TRANSFER_LAST
from forebay_wire.urls import split_host_port

Side = tuple[Arena, SimulatedTransport]


@pytest.fixture
def start() -> Iterator[Callable[..., Side]]:
    made: list[SimulatedTransport] = []

    def make(bandwidth: float = 1e12) -> Side:
        arena = Arena("simulated", 128, bandwidth=bandwidth)
        transport = arena.transport()
        assert isinstance(transport, SimulatedTransport)
        made.append(transport)
        return arena, transport

    yield make
    for transport in made:
        transport.close()


def handshake(side: Side, engine_id: str = "owner") -> Handshake:
    return Handshake(
        engine_id=engine_id,
        compatibility=compatibility(),
        compat_hash="",
        transport="simulated",
        agent=side[1].agent(),
        base_address=0,
        block_bytes=BLOCK_BYTES,
        num_blocks=128,
    )


def test_it_is_served_on_ports_that_network_policies_open(start: Callable[..., Side]) -> None:
    ports = {split_host_port(start()[1].agent().decode())[1] for _ in range(4)}
    assert len(ports) == 4
    assert ports <= set(range(TRANSFER_FIRST, TRANSFER_LAST + 1))


def test_a_range_without_a_free_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"none of the ports {port} to {port} of 127.0.0.1 is free; end some"):
            simulated.listener("127.0.0.1", range(port, port + 1))


def test_a_refilled_block_reads_as_success_with_the_new_content(start: Callable[..., Side]) -> None:
    owner, (arena, transport) = start(), start()
    owner[0].fill(1)
    transport.add_peer(handshake(owner))
    owner[0].fill(2, [3])
    transport.read("owner", [3, 4], [0, 1], timeout=5)
    assert arena.holds(0, 2, 3)
    assert arena.holds(1, 1, 4)


def test_a_read_lasts_as_long_as_its_bytes(start: Callable[..., Side]) -> None:
    owner, (arena, transport) = start(), start(bandwidth=BLOCK_BYTES * 128 / 0.3)
    owner[0].fill(1)
    transport.add_peer(handshake(owner))
    started = time.monotonic()
    transport.read("owner", range(128), range(128), timeout=5)
    assert 0.3 <= time.monotonic() - started < 1.5
    assert all(arena.holds(block, 1, block) for block in range(128))


def test_a_long_read_sees_its_blocks_at_different_times(start: Callable[..., Side]) -> None:
    """The second half is read when its time has come, not when the read began."""
    owner, (arena, transport) = start(), start(bandwidth=BLOCK_BYTES * 128 / 1.0)
    owner[0].fill(1)
    transport.add_peer(handshake(owner))
    reading = threading.Thread(target=lambda: transport.read("owner", range(128), range(128), timeout=5))
    reading.start()
    deadline = time.monotonic() + 5
    while not arena.holds(0, 1, 0) and time.monotonic() < deadline:
        time.sleep(0.005)
    owner[0].fill(2)
    reading.join(5)
    assert arena.holds(0, 1, 0)
    assert arena.holds(127, 2, 127)


def test_a_timeout_is_kept(start: Callable[..., Side]) -> None:
    owner, (arena, transport) = start(), start(bandwidth=BLOCK_BYTES / 60)
    transport.add_peer(handshake(owner))
    started = time.monotonic()
    with pytest.raises(TransferError) as failure:
        transport.read("owner", [0], [0], timeout=0.2)
    assert failure.value.reason == "timeout"
    assert time.monotonic() - started < 1
    assert not arena.blocks.any()


def test_a_connection_its_owner_closed_meanwhile_is_made_anew(
    start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "IDLE_SECONDS", 0.1)
    owner, (_, transport) = start(), start()
    transport.add_peer(handshake(owner))
    deadline = time.monotonic() + 5
    while owner[1]._server._clients and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not owner[1]._server._clients
    transport.read("owner", [0], [0], timeout=5)


def test_a_dead_owner_is_forgotten(start: Callable[..., Side]) -> None:
    owner, (_, transport) = start(), start()
    transport.add_peer(handshake(owner))
    owner[1].close()
    with pytest.raises(TransferError) as failure:
        transport.read("owner", [0], [0], timeout=5)
    assert failure.value.reason == "disconnected"
    assert not transport.knows("owner")


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<II", 0x46424B56, 1 << 20), b"\0" * 64],
    ids=["http", "too many blocks", "zeros"],
)
def test_whoever_does_not_speak_the_format_is_dropped(start: Callable[..., Side], request_bytes: bytes) -> None:
    _, transport = start()
    host, _, port = transport.agent().decode().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(request_bytes)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_blocks_outside_the_arena_are_refused_by_the_owner_itself(start: Callable[..., Side]) -> None:
    owner, (_, transport) = start(), start()
    lying = handshake(owner)
    lying.num_blocks = 10_000
    transport.add_peer(lying)
    with pytest.raises(TransferError) as failure:
        transport.read("owner", [5000], [0], timeout=5)
    assert failure.value.reason == "refused"
    transport.read("owner", [0], [0], timeout=5)


def test_connections_are_bounded(start: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "MAX_CONNECTIONS", 3)
    _, transport = start()
    host, _, port = transport.agent().decode().rpartition(":")
    socks = [socket.create_connection((host, int(port)), timeout=5) for _ in range(4)]
    ask = struct.pack("<II", 0x46424B56, 1) + struct.pack("<I", 0)
    for sock in socks[:3]:
        sock.sendall(ask)
        assert len(sock.recv(20)) > 0
    with contextlib.suppress(ConnectionResetError):
        assert socks[3].recv(1) == b""
    for sock in socks:
        sock.close()
