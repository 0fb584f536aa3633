"""The one interface between Forebay and a KV transport: NIXL for real, a twin that fakes only time and bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from forebay_engine.kv.lease_words import LeaseMark
from forebay_engine.types import UnsettledRead
from forebay_wire.messages import Handshake


class TransferError(RuntimeError):
    """A read did not happen: peer gone, deadline passed, address refused. The local blocks' content is undefined.

    `reason` is one word for counters. `unsettled`: the transport can't exclude that the local blocks are still written
    to (rare: the peer hung in the middle of a direct read): they must not be used again before that is over.
    """

    def __init__(self, message: str, *, reason: str = "failed", unsettled: UnsettledRead | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.unsettled = unsettled


class Transport(Protocol):
    """One-sided reads between arenas. Blocking calls, made from worker threads, never from an event loop.

    A read of a block that its owner refilled meanwhile succeeds with the new content: the lease protocol above
    (transfer/service.py) is what makes that harmless.
    """

    needs_progress: bool
    """Whether progress() does anything."""

    def agent(self) -> bytes:
        """Opaque metadata that lets a peer read this arena; goes into the handshake."""

    def add_peer(self, handshake: Handshake) -> None:
        """Make a peer's arena readable, and warm the pair up. Known peers are left alone. Raises TransferError."""

    def remove_peer(self, engine_id: str) -> None: ...

    def knows(self, engine_id: str) -> bool:
        """Whether the peer can be read without a new handshake (a broken connection makes a transport forget it)."""

    def read(
        self,
        engine_id: str,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        timeout: float,
        cancel: threading.Event | None = None,
        lease: LeaseMark | None = None,
    ) -> bool:
        """Copy remote_blocks[i] of the peer into local_blocks[i]; then say whether `lease` stands there.

        The lease's word is read once all blocks have landed. False: it is not there, the peer has no words, or `lease`
        is None; only the owner can say then.

        Raises TransferError by `timeout` seconds at latest, or soon after `cancel` is set. When this returns or raises,
        nothing writes to the local blocks any more (but see TransferError.unsettled).
        """

    def progress(self) -> None:
        """Drive connection set-up and transfers that peers make; called often while any are to be expected."""

    def in_use(self) -> str:
        """What moves the bytes: RDMA | NVLink | TCP | SharedMemory | Simulated | Unknown; never a guess."""

    def close(self) -> None: ...


def check_blocks(
    remote_blocks: Sequence[int], local_blocks: Sequence[int], *, remote_total: int, local_total: int
) -> None:
    """Raise TransferError unless the two lists pair up and every id lies inside its arena.

    A read outside an arena would not be refused alone: it may take the whole connection down.
    """
    if len(remote_blocks) != len(local_blocks):
        raise TransferError(
            f"read of {len(remote_blocks)} remote blocks into {len(local_blocks)} local ones: the lists must pair up",
            reason="refused",
        )
    if len(set(local_blocks)) != len(local_blocks):
        raise TransferError("read into the same local block twice: each may be named once", reason="refused")
    for what, blocks, total in (("remote", remote_blocks, remote_total), ("local", local_blocks, local_total)):
        for block in (min(blocks, default=0), max(blocks, default=0)):
            if not 0 <= block < total:
                raise TransferError(
                    f"read of {what} block {block}: the {what} arena has blocks 0 to {total - 1}", reason="refused"
                )
