"""HTTP to other workers' internal endpoints: one session, keep-alive, a deadline on every call."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
import msgspec

from forebay_engine.transfer.base import TransferError
from forebay_wire import paths
from forebay_wire.messages import (
    CompleteResponse,
    Handshake,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
)
from forebay_wire.urls import host_port

MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""A handshake is the largest: NIXL's metadata, 45 bytes a registered region."""

CONNECTIONS_PER_PEER = 64
"""Long polls occupy one each; what is beyond waits, within its own deadline."""

KEEPALIVE_SECONDS = 30.0
"""Less than the server's 75 s, so that a connection is never reused while its server closes it."""

T = TypeVar("T")


class PeerError(TransferError):
    """A call to a peer failed; `reason` is peer_timeout, peer_unreachable, peer_refused or peer_garbled."""


class PeerClient:
    """Make and use it on one event loop."""

    def __init__(self, token: str | None) -> None:
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def handshake(self, host: str, port: int, *, timeout: float) -> Handshake:
        return await self._call("GET", host, port, paths.HANDSHAKE, None, Handshake, timeout)

    async def heartbeat(self, host: str, port: int, leases: list[LeaseRef], *, timeout: float) -> HeartbeatResponse:
        body = HeartbeatRequest(leases=leases)
        return await self._call("POST", host, port, paths.LEASE_HEARTBEAT, body, HeartbeatResponse, timeout)

    async def complete(self, host: str, port: int, lease: LeaseRef, *, timeout: float) -> CompleteResponse:
        return await self._call("POST", host, port, paths.LEASE_COMPLETE, lease, CompleteResponse, timeout)

    async def progress(self, host: str, port: int, request: ProgressRequest, *, timeout: float) -> ProgressResponse:
        return await self._call("POST", host, port, paths.LEASE_PROGRESS, request, ProgressResponse, timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, host: str, port: int, path: str, body: msgspec.Struct | None, answer: type[T], timeout: float
    ) -> T:
        """Raises PeerError by `timeout` seconds at latest."""
        where = host_port(host, port)
        if timeout <= 0:
            raise PeerError(f"{method} {path} at {where}: no time left", reason="peer_timeout")
        if self._session is None:
            # aiohttp sets TCP_NODELAY on every connection.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, limit_per_host=CONNECTIONS_PER_PEER, keepalive_timeout=KEEPALIVE_SECONDS
                ),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent", "accept", "accept-encoding"),
            )
        try:
            async with self._session.request(
                method,
                f"http://{where}{path}",
                data=None if body is None else msgspec.json.encode(body),
                headers=None if body is None else {"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout),
                allow_redirects=False,
            ) as response:
                raw = await _read_bounded(response)
                if response.status != 200:
                    text = raw[:200].decode(errors="replace")
                    raise PeerError(
                        f"{method} {path} at {where}: HTTP {response.status}: {text}", reason="peer_refused"
                    )
        except TimeoutError as error:
            raise PeerError(
                f"{method} {path} at {where}: no answer in {timeout:.2f} s", reason="peer_timeout"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerError(f"{method} {path} at {where}: {error!r}", reason="peer_unreachable") from error
        try:
            return msgspec.json.decode(raw, type=answer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PeerError(
                f"{method} {path} at {where}: answer not understood: {error}", reason="peer_garbled"
            ) from error


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"answer longer than {MAX_ANSWER_BYTES} bytes")
    return bytes(raw)
