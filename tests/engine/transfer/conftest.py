"""Owners in processes of their own, readers in this one."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from engine.transfer.arena import BLOCK_BYTES
from engine.transfer.owners import LEASE, Owner, Reader, StartOwner, StartReader


@pytest.fixture(scope="session", autouse=True)
def many_descriptors() -> None:
    """Every test's NIXL agent lives until the process ends, with a dozen descriptors each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.fixture(scope="session")
def idle_owners() -> Iterator[dict[tuple[Any, ...], Owner]]:
    """Owners that an earlier test left unharmed: starting one takes 1.5 s."""
    owners: dict[tuple[Any, ...], Owner] = {}
    yield owners
    for owner in owners.values():
        owner.stop()


@pytest.fixture
async def start_owner(idle_owners: dict[tuple[Any, ...], Owner]) -> AsyncIterator[StartOwner]:
    used: list[tuple[tuple[Any, ...], Owner]] = []

    async def start(
        kind: str,
        *,
        blocks: int = 512,
        block_bytes: int = BLOCK_BYTES,
        lease: float = LEASE,
        dtype: str = "float32",
    ) -> Owner:
        key = (kind, blocks, block_bytes, lease, dtype)
        owner = idle_owners.pop(key, None)
        if owner is None:
            owner = Owner(kind, blocks=blocks, block_bytes=block_bytes, lease=lease, dtype=dtype)
            owner.launch()
        used.append((key, owner))
        await owner.ready()
        return owner

    yield start
    for key, owner in used:
        if owner.reusable and key not in idle_owners:
            idle_owners[key] = owner
        else:
            owner.stop()


@pytest.fixture
async def start_reader() -> AsyncIterator[StartReader]:
    readers: list[Reader] = []

    async def start(kind: str, **options: Any) -> Reader:
        reader = Reader(kind, **options)
        readers.append(reader)
        await reader.service.start()
        return reader

    yield start
    for reader in readers:
        await reader.service.stop()
