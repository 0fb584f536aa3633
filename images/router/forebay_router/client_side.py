"""The client's end of a request, as the state machine sees it. server.py has the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ClientGone(Exception):
    """The client closed its connection."""


class ClientSide(Protocol):
    started: bool
    """Status and headers of a stream are out: errors can only be events now."""

    async def start(self, headers: Mapping[str, str]) -> None:
        """Begin an SSE answer with status 200. Nothing is sent before the first write. Raises ClientGone."""

    async def write(self, data: bytes) -> None:
        """Send; waits while the client's buffer is full. Raises ClientGone."""

    def write_now(self, data: bytes) -> bool:
        """Send, after a first `write`. False: the client's buffer is full, and `drain` is due before more. Raises
        ClientGone."""

    async def drain(self) -> None:
        """Wait for room in the client's buffer. Raises ClientGone."""

    async def finish(self, last: bytes = b"") -> None:
        """End the stream, with `last` in the same packet as its end. Raises ClientGone."""

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer. Raises ClientGone, also when the client does not read it in time."""

    def abort(self) -> None:
        """Close the connection as it is."""
