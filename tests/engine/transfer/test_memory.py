"""Arenas in host memory and in torch tensors: blocks land where they belong, and NIXL is told where that is."""

from __future__ import annotations

import asyncio
import ctypes
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engine.transfer.arena import BLOCK_BYTES, Arena, compatibility  # noqa: E402
from engine.transfer.owners import TOKEN, StartOwner  # noqa: E402
from forebay_engine.kv.lease_words import COUNT, LeaseWords  # noqa: E402
from forebay_engine.kv.leases import LeaseTable  # noqa: E402
from forebay_engine.transfer import nixl_agent  # noqa: E402
from forebay_engine.transfer.device_memory import DeviceMemory  # noqa: E402
from forebay_engine.transfer.memory import HOST, ArenaMemory, HostMemory, Place  # noqa: E402
from forebay_engine.transfer.nixl import NixlTransport  # noqa: E402
from forebay_engine.transfer.peers import PeerClient  # noqa: E402
from forebay_engine.transfer.service import Identity, TransferService  # noqa: E402
from forebay_wire.messages import Handshake  # noqa: E402

VRAM = Place("VRAM", 3)


def host(arena: Any) -> ArenaMemory:
    return HostMemory(arena.data_ptr(), arena[0].nbytes)


@pytest.mark.parametrize("make", [host, DeviceMemory], ids=["host", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_copied_bit_by_bit_and_no_other_is_touched(make: Any, dtype: Any) -> None:
    arena = torch.zeros(7, 2, 3, 2, 16, 24, dtype=dtype)
    memory: ArenaMemory = make(arena)
    size = arena[0].nbytes
    buffer = memory.allocate(4 * size)
    # Any bits: some are no numbers, and must arrive all the same.
    content = np.random.default_rng(0).integers(0, 256, 4 * size, dtype=np.uint8)
    ctypes.memmove(buffer.address, content.ctypes.data, buffer.nbytes)
    memory.put(buffer, [5, 0, 3])
    memory.put(buffer, [])
    found = arena.view(7, -1).view(torch.uint8).numpy()
    for place, block in enumerate([5, 0, 3]):
        assert np.array_equal(found[block], content[place * size : (place + 1) * size])
    assert not found[[1, 2, 4, 6]].any()


async def test_a_tensor_is_read_into_as_host_memory_is(start_owner: StartOwner) -> None:
    owner = await start_owner("auto")
    await owner.call("fill", seed=4)
    arena = torch.zeros(8, BLOCK_BYTES // 2, dtype=torch.bfloat16)
    transport = NixlTransport(
        address=arena.data_ptr(), block_bytes=BLOCK_BYTES, num_blocks=8, keepalive=arena, memory=DeviceMemory(arena)
    )
    peers = PeerClient(TOKEN)
    try:
        await asyncio.to_thread(transport.add_peer, await peers.handshake("127.0.0.1", owner.port, timeout=5))
        await asyncio.to_thread(transport.read, owner.engine_id, [511, 7], [0, 6], timeout=5.0)
    finally:
        await peers.close()
        transport.close()
    told = Arena("auto", 1)
    found = arena.view(torch.uint8).numpy()
    assert found[0].tobytes() == told.expected(4, 511)
    assert found[6].tobytes() == told.expected(4, 7)
    assert not found[[1, 2, 3, 4, 5, 7]].any()


class OnGpu(HostMemory):
    """Host memory that says it is GPU 3's."""

    place = VRAM

    def __init__(self, address: int, block_bytes: int) -> None:
        super().__init__(address, block_bytes)
        self.entered = 0

    def enter(self) -> None:
        self.entered += 1


class Calls:
    """NIXL's agent that only notes what it is told of memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.registered: dict[int, tuple[int, str]] = {}
        self.described: list[tuple[str, int, int, str]] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> int:
        ((address, _, device, _),) = regions
        self.registered[address] = (device, kind)
        return address

    def prep_xfer_dlist(self, agent: str, strided: Any, kind: str) -> object:
        address, _, device, _, _ = (int(n) for n in strided[0])
        self.described.append((agent, address, device, kind))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def transfer(self, handle: object) -> str:
        return "DONE"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: object()


@pytest.mark.parametrize("theirs", [HOST, Place("VRAM", 1)], ids=str)
def test_nixl_is_told_which_memory_and_which_gpu(theirs: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Calls()
    api = SimpleNamespace(nixl_agent=lambda *_: agent, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent, "_import_nixl", lambda: api)
    arena = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    memory, words = OnGpu(arena.ctypes.data, BLOCK_BYTES), LeaseWords("e")
    transport = NixlTransport(
        address=arena.ctypes.data,
        block_bytes=BLOCK_BYTES,
        num_blocks=4,
        words=words,
        keepalive=arena,
        memory=memory,
    )
    assert agent.registered == {arena.ctypes.data: (3, "VRAM"), words.address: (0, "DRAM")}

    peer = Handshake(
        engine_id="p",
        compatibility=compatibility(),
        compat_hash="",
        transport="nixl",
        agent=b"peer",
        base_address=4096,
        block_bytes=BLOCK_BYTES,
        num_blocks=9,
        words_address=512,
        num_words=COUNT,
        memory=theirs.kind,
        device=theirs.device,
    )
    before = memory.entered
    transport.add_peer(peer)
    assert memory.entered > before
    assert {(address, device, kind) for name, address, device, kind in agent.described if name == "peer"} == {
        (4096, theirs.device, theirs.kind),
        (512, 0, "DRAM"),
    }
    landing = [
        place for address, place in agent.registered.items() if address not in (arena.ctypes.data, words.address)
    ]
    assert landing == [(3, "VRAM")]  # the warm-up read takes the route that the others will take
    transport.close()


async def test_the_kind_of_memory_is_told_and_does_not_part_peers() -> None:
    def handshake(place: Place) -> Handshake:
        service = TransferService(
            identity=Identity("e", compatibility(), "nixl", 4096, BLOCK_BYTES, 2, place),
            transport=Arena("simulated", 2).transport(),
            leases=LeaseTable(30.0),
            peers=PeerClient(None),
            on_freed=lambda blocks: None,
            on_expired=lambda blocks: None,
            pull_timeout_seconds=20.0,
        )
        return service.handshake()

    here, there = handshake(HOST), handshake(VRAM)
    assert here.compat_hash == there.compat_hash
    assert (there.memory, there.device) == ("VRAM", 3)
    # A worker of the release before reads what a host arena sends: it refuses fields that it doesn't know.
    assert b"memory" not in msgspec.json.encode(here)
    assert msgspec.json.decode(msgspec.json.encode(there), type=Handshake) == there
