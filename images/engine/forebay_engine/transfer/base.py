"""The one interface between Forebay and a KV transport: NIXL for real, a twin that fakes only time and bytes."""

from __future__ import annotations

from typing import Protocol

from forebay_wire.messages import Handshake


class TransferError(RuntimeError):
    """A read did not happen: peer gone, deadline passed, address refused. The local blocks' content is undefined."""


class Transport(Protocol):
    """One-sided reads between arenas. Blocking calls, made from worker threads, never from an event loop.

    A read of a block that its owner refilled meanwhile succeeds with the new content: the lease protocol above
    (transfer/service.py) is what makes that harmless.
    """

    def agent(self) -> bytes:
        """Opaque metadata that lets a peer read this arena; goes into the handshake."""

    def add_peer(self, handshake: Handshake) -> None:
        """Make a peer's arena readable, and warm the pair up. Known peers are left alone. Raises TransferError."""

    def remove_peer(self, engine_id: str) -> None: ...

    def read(self, engine_id: str, remote_blocks: list[int], local_blocks: list[int], *, timeout: float) -> None:
        """Copy remote_blocks[i] of the peer into local_blocks[i]. Raises TransferError, by `timeout` at latest."""

    def progress(self) -> None:
        """Drive connection set-up and transfers that peers make; called often while any are to be expected."""

    def in_use(self) -> str:
        """What moves the bytes: RDMA | NVLink | TCP | SharedMemory | Simulated | Unknown; never a guess."""

    def close(self) -> None: ...
