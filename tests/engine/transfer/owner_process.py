"""A prefill worker without a model: arena, lease table, transfer service and its HTTP endpoints, driven by tests.

    python owner_process.py KIND NUM_BLOCKS BLOCK_BYTES LEASE_SECONDS DTYPE PORT

Prints its port when ready. /test/* sets the scene; the other endpoints are a worker's.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from forebay_engine.core.processes import exit_now
from forebay_engine.kv.lease_words import LeaseWords
from forebay_engine.kv.leases import LeaseTable
from forebay_engine.transfer.peers import PeerClient
from forebay_engine.transfer.service import Identity, TransferService
from forebay_wire import paths
from forebay_wire.messages import HeartbeatRequest, LeaseRef, ProgressRequest

sys.path.insert(0, str(Path(__file__).parent))
from arena import Arena, compatibility

TOKEN = "owner-token"


class OwnerProcess:
    def __init__(self, kind: str, blocks: int, block_bytes: int, lease: float, dtype: str) -> None:
        self.arena = Arena(kind, blocks, block_bytes)
        self.words = LeaseWords(f"owner-{uuid.uuid4().hex}")
        self.leases = LeaseTable(lease, self.words)
        self.freed: list[list[int]] = []
        self.expired: list[list[int]] = []
        self.handshakes = 0
        self.service = TransferService(
            identity=Identity(
                engine_id=self.words.engine_id,
                compatibility=compatibility(dtype),
                transport="simulated" if kind == "simulated" else "nixl",
                base_address=self.arena.address,
                block_bytes=block_bytes,
                num_blocks=blocks,
            ),
            transport=self.arena.transport(self.words),
            leases=self.leases,
            peers=PeerClient(TOKEN),
            on_freed=lambda b: self.freed.append(list(b)),
            on_expired=lambda b: self.expired.append(list(b)),
            pull_timeout_seconds=lease / 2,
        )

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_authorise])
        app.router.add_get(paths.HANDSHAKE, self._handshake)
        app.router.add_post(paths.LEASE_HEARTBEAT, self._heartbeat)
        app.router.add_post(paths.LEASE_COMPLETE, self._complete)
        app.router.add_post(paths.LEASE_PROGRESS, self._progress)
        app.router.add_post("/test/{call}", self._test)
        return app

    async def _handshake(self, _: web.Request) -> web.Response:
        self.handshakes += 1
        return _json(self.service.handshake())

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=HeartbeatRequest)
        return _json(self.service.heartbeat(body.leases))

    async def _complete(self, request: web.Request) -> web.Response:
        return _json(self.service.complete(msgspec.json.decode(await request.read(), type=LeaseRef)))

    async def _progress(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=ProgressRequest)
        return _json(await self.service.progress(body))

    async def _test(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        match request.match_info["call"]:
            case "reset":
                self.leases = self.service._owner._leases = LeaseTable(self.leases.lease_seconds, self.words)
                self.freed.clear()
                self.expired.clear()
                self.handshakes = 0
            case "fill":
                self.arena.fill(body["seed"], body.get("blocks"))
            case "begin":
                self.leases.begin(body["request_id"])
            case "advance":
                self.leases.advance(body["request_id"], body["blocks"])
                self.service.wake()
            case "restart":
                self.leases.restart(body["request_id"])
                self.service.wake()
            case "grant":
                now = asyncio.get_running_loop().time()
                lease = self.leases.grant(body["request_id"], body["blocks"], body["num_tokens"], now)
                self.service.wake()
                return _json({"epoch": lease.epoch})
            case "cancel":
                lease = self.leases.cancel(body["request_id"], asyncio.get_running_loop().time())
                if lease is not None:
                    self.freed.append(list(lease.blocks))
        return _json(
            {
                "freed": self.freed,
                "expired": self.expired,
                "held": self.leases.held_blocks,
                "handshakes": self.handshakes,
                "engine_id": self.service.handshake().engine_id,
            }
        )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@web.middleware
async def _authorise(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.headers.get("authorization") != f"Bearer {TOKEN}":
        return web.Response(status=401)
    return await handler(request)  # type: ignore[no-any-return]


async def main() -> None:
    kind, blocks, block_bytes, lease, dtype, port = sys.argv[1:]
    owner = OwnerProcess(kind, int(blocks), int(block_bytes), float(lease), dtype)
    await owner.service.start()
    runner = web.AppRunner(owner.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", int(port))
    await site.start()
    print(runner.addresses[0][1], flush=True)
    # The test closes our standard input when it is done with us.
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    await runner.cleanup()
    await owner.service.stop()


if __name__ == "__main__":
    asyncio.run(main())
    exit_now(0)
