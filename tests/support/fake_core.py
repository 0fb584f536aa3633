"""A core that computes nothing: tokens are a hash of (prompt, seed, choice, position), so any worker gives the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from forebay_engine.core.handle import CoreDied, CoreInfo, CoreStats
from forebay_engine.types import EngineRequest, FailEvent, HoldInfo, TokenEvent
from forebay_wire.messages import (
    Compatibility,
    CompleteResponse,
    Handshake,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
    ReserveRequest,
    ReserveResponse,
)
from forebay_wire.transfer import TokenLogprob

Event = TokenEvent | FailEvent

WORDS = [b"a", b"b", b" ", b"\n", "\u00e9".encode(), "\u20ac".encode(), "\U0001f600".encode(), b"E", b"N", b"D", b"END"]
SCRIPT = [byte for word in WORDS for byte in word]
"""Byte ids that answers are cut from: whole and half characters, and the letters of the stop string END."""


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class FakeCore:
    """core/handle.py: CoreHandle. Knobs are plain attributes; what was asked of it is kept in lists."""

    def __init__(self, *, engine_id: str = "engine-1", max_model_len: int = 256, batch: int = 1) -> None:
        self.info = CoreInfo(
            engine_id=engine_id,
            compat_hash="compat",
            max_model_len=max_model_len,
            vocab_size=260,
            block_size=16,
            total_blocks=100,
            dtype="float32",
            transport="Simulated",
        )
        self.stats = CoreStats(total_blocks=100, free_blocks=60, transport="Simulated")
        self.batch = batch
        """Tokens per event."""

        self.script: list[int] | None = None
        """Fixed tokens, instead of hashed ones."""

        self.fail: FailEvent | None = None
        self.fail_at = 0
        """Position at which `fail` comes."""

        self.gate: asyncio.Event | None = None
        """When set, every token from position `gate_at` on waits for it."""

        self.gate_at = 0

        self.loading: asyncio.Event | None = None
        self.load_error: Exception | None = None
        self.dead: CoreDied | None = None
        self.requests: list[EngineRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.calls: list[tuple[str, object]] = []
        self.draining = False
        self.closed = False

    async def start(self) -> CoreInfo:
        if self.loading is not None:
            await self.loading.wait()
        if self.load_error is not None:
            raise self.load_error
        return self.info

    def token(self, request: EngineRequest, position: int) -> int:
        if self.script is not None:
            return self.script[position % len(self.script)]
        params = request.params
        noise = _hash(request.prompt_ids, params.seed, params.choice, position)
        if params.stop_token_ids and position >= params.min_tokens and noise % 23 == 0:
            return params.stop_token_ids[noise // 23 % len(params.stop_token_ids)]
        if noise % 13 == 0:
            return 258  # special, but no end
        # Whole characters mostly: position within a word follows from a run of positions.
        word = WORDS[_hash(request.prompt_ids, params.seed, params.choice, position // 4) % len(WORDS)]
        return word[position % 4] if position % 4 < len(word) else SCRIPT[noise % len(SCRIPT)]

    def logprob(self, token_id: int, position: int, count: int) -> TokenLogprob:
        first = -(_hash(token_id, position) % 1000) / 997
        top = [(SCRIPT[(token_id + i) % len(SCRIPT)], first - i / 7) for i in range(count)]
        if token_id == 97:
            first = float("-inf")
        return TokenLogprob(token_id, first, top)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        if request.request_id in self.running:
            yield FailEvent(request.request_id, 409, "running already")
            return
        self.running.add(request.request_id)
        ended = False
        try:
            async for event in self._events(request):
                ended = isinstance(event, FailEvent) or event.finish_reason is not None or event.hold is not None
                yield event
        finally:
            self.running.discard(request.request_id)
            if not ended:
                self.aborted.append(request.request_id)

    async def _events(self, request: EngineRequest) -> AsyncIterator[Event]:
        params = request.params
        position = len(request.output_ids)
        first = True
        while True:
            ids: list[int] = []
            finish = None
            while len(ids) < (1 if request.hold else self.batch) and finish is None:
                if self.gate is not None and position + len(ids) >= self.gate_at:
                    await self.gate.wait()
                if self.dead is not None:
                    raise self.dead
                if self.fail is not None and position + len(ids) >= self.fail_at:
                    yield self.fail
                    return
                ids.append(self.token(request, position + len(ids)))
                if ids[-1] in params.stop_token_ids:
                    finish = "stop"
                elif position + len(ids) >= params.max_tokens:
                    finish = "length"
            event = TokenEvent(request.request_id, ids, finish_reason=finish)
            if params.logprobs is not None:
                event.logprobs = [self.logprob(t, position + i, params.logprobs) for i, t in enumerate(ids)]
            if first:
                event.cached_tokens = len(request.prompt_ids) // 16 * 16
                if params.prompt_logprobs is not None:
                    event.prompt_logprobs = [
                        self.logprob(t, i, params.prompt_logprobs) for i, t in enumerate(request.prompt_ids) if i
                    ]
            if request.hold and finish is None:
                event.hold = HoldInfo([3, 1, 4], len(request.prompt_ids), epoch=7, lease_seconds=30.0)
            position, first = position + len(ids), False
            await asyncio.sleep(0)
            yield event
            if finish is not None or event.hold is not None:
                return

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _call(self, name: str, argument: object) -> None:
        if self.dead is not None:
            raise self.dead
        self.calls.append((name, argument))

    async def handshake(self) -> Handshake:
        self._call("handshake", None)
        compatibility = Compatibility("0", "m", "float32", 1, 1, 8, 16, "layout")
        return Handshake(self.info.engine_id, compatibility, "compat", "Simulated", b"\x00\xff", 0, 65536, 100)

    async def heartbeat(self, leases: list[LeaseRef]) -> HeartbeatResponse:
        self._call("heartbeat", leases)
        return HeartbeatResponse(extended=[lease.request_id for lease in leases], gone=[])

    async def complete(self, lease: LeaseRef) -> CompleteResponse:
        self._call("complete", lease)
        return CompleteResponse(unbroken=True)

    async def cancel(self, request_id: str) -> None:
        self._call("cancel", request_id)

    async def progress(self, request: ProgressRequest) -> ProgressResponse:
        self._call("progress", request)
        return ProgressResponse(state="running", block_ids=[3], epoch=7)

    async def reserve(self, request: ReserveRequest) -> ReserveResponse:
        self._call("reserve", request)
        return ReserveResponse(admitted=True)

    async def release(self, request_id: str) -> None:
        self._call("release", request_id)

    def set_draining(self, draining: bool) -> None:
        self.draining = draining

    async def close(self) -> None:
        self.closed = True
