"""What a worker's server knows at one moment, and the load report made of it."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from forebay_engine.core.handle import CoreHandle, CoreInfo
from forebay_engine.server.plan import ModelLimits
from forebay_engine.server.prefixes import PrefixLog
from forebay_engine.settings import WorkerSettings
from forebay_engine.text.tokenizer import Tokenizer
from forebay_wire import headers
from forebay_wire.errors import ApiError
from forebay_wire.load import LoadLine, LoadReport

MAX_ROUTERS = 64
"""Routers counted apart; the one not heard of for longest is forgotten."""

VELOCITY_WINDOW_SECONDS = 30.0

_IN_USE = {"rdma": "RDMA", "nvlink": "NVLink", "tcp": "TCP", "shared-memory": "SharedMemory"}
"""What a transport asked for is called while it is in use."""


class PrefillVelocity:
    """Prompt tokens per busy second over the last window: (tokens, seconds) are totals, sampled as reports are made."""

    def __init__(self, window: float = VELOCITY_WINDOW_SECONDS) -> None:
        self._window = window
        self._samples: deque[tuple[float, int, float]] = deque()
        self._last = 0.0

    def update(self, tokens: int, busy_seconds: float, now: float) -> float:
        samples = self._samples
        if not samples or now - samples[-1][0] >= self._window / 30:
            samples.append((now, tokens, busy_seconds))
        # The oldest sample kept is the last one older than the window, so that the difference spans it.
        while len(samples) > 1 and now - samples[1][0] > self._window:
            samples.popleft()
        busy = busy_seconds - samples[0][2]
        if busy > 0:
            self._last = (tokens - samples[0][1]) / busy
        elif self._last == 0.0 and busy_seconds > 0:
            self._last = tokens / busy_seconds
        return self._last


@dataclass
class WorkerState:
    settings: WorkerSettings
    core: CoreHandle
    tokenizer: Tokenizer
    secret: bytes | None
    """Content of the token file; None closes the internal endpoints."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    info: CoreInfo | None = None
    """None while the model is being loaded."""

    loaded_unix: int = 0
    port: int = 0
    """The port that listens, which the settings may leave open (0)."""

    draining: bool = False
    stalled: bool = False
    """The core answers no pings; it may wake up."""

    in_flight: int = 0
    """Requests being answered."""

    last_hold: float = float("-inf")
    """Monotonic time of the last lease handed out."""

    died: asyncio.Event = field(default_factory=asyncio.Event)
    """The core is gone."""

    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """The server is about to stop; streams without an end of their own end now."""

    encoders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encode"))
    """Tokenises long texts, one at a time: beside the event loop, not beside every core of the machine."""

    prefixes: PrefixLog = field(default_factory=PrefixLog)
    _seen: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _answering: set[asyncio.Task[object]] = field(default_factory=set)
    _epoch: int = 0
    _velocity: PrefillVelocity = field(default_factory=PrefillVelocity)
    _ids: int = 0

    @property
    def unready(self) -> str | None:
        """Why requests are refused now; None when they are served."""
        if self.died.is_set():
            return "the engine has died"
        if self.info is None:
            return "the model is being loaded"
        if self.stalled:
            return "the engine does not answer"
        return "draining" if self.draining else self._worse_transport()

    def _worse_transport(self) -> str | None:
        """Known from the first read on: UCX chooses then. What it does not tell counts as what was asked for."""
        wanted, used = _IN_USE.get(self.settings.transport), self.core.stats.transport
        if not self.settings.transport_required or wanted is None or used in (wanted, "Unknown"):
            return None
        return f"KV moves over {used}, and {wanted} is required (spec.transfer.required)"

    def serving(self) -> CoreInfo:
        """Raises ApiError 503 unless new requests are served."""
        why = self.unready
        if why is not None or self.info is None:
            # Short: the router asks another worker at once, a client without a router soon again.
            raise ApiError(503, f"worker {self.settings.name}: {why}", code="not_ready", retry_after=1.0)
        return self.info

    def loaded(self) -> CoreInfo:
        """Raises ApiError 503 until the model is loaded; draining workers still answer for their leases."""
        if self.info is None:
            raise ApiError(503, f"worker {self.settings.name}: {self.unready}", code="not_ready", retry_after=1.0)
        return self.info

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self.core.set_draining(draining)

    def limits(self, info: CoreInfo) -> ModelLimits:
        return ModelLimits(self.settings.served_name, info.max_model_len, info.vocab_size)

    @contextmanager
    def admit(self, router: str | None) -> Iterator[CoreInfo]:
        """Around each request for an answer: counted from its head to its last byte, refused beyond the bound.

        Raises ApiError 503 while not serving, 429 when too many are here already.
        """
        self._count_router(router)
        info = self.serving()
        most = self.settings.max_running + self.settings.max_waiting
        if self.in_flight >= most:
            raise ApiError(429, f"{self.in_flight} requests are here, at most {most} may be", retry_after=1.0)
        self.in_flight += 1
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            yield info
        finally:
            self._answering.discard(task)
            self.in_flight -= 1

    def hand_on(self) -> int:
        """Break off every answer under way, as if this process had died: the router continues it on another worker.

        How many there were. To be called while draining, or new ones take their place.
        """
        for task in self._answering:
            task.cancel()
        return len(self._answering)

    def _count_router(self, router: str | None) -> None:
        if router is None:
            return
        self._seen[router] = self._seen.get(router, 0) + 1
        self._seen.move_to_end(router)
        if len(self._seen) > MAX_ROUTERS:
            self._seen.popitem(last=False)

    def fresh_id(self, request_id: str) -> str:
        """Name for a request in the core that no lease or reservation goes by, and no other request has."""
        self._ids += 1
        return f"{request_id}~{self._ids}"

    def trusts(self, authorization: str | None) -> bool:
        """Whether the header carries the secret, which routers and the other workers know."""
        return self.secret is not None and hmac.compare_digest(headers.bearer(authorization) or b"", self.secret)

    def authorize(self, authorization: str | None) -> bytes:
        """The secret, when the header carries it as its bearer. Raises ApiError 401 or 403."""
        if self.secret is None:
            raise ApiError(403, "internal endpoints are closed; start the worker with --token-file", code="closed")
        if not self.trusts(authorization):
            raise ApiError(401, "a valid bearer token is required here", code="invalid_token")
        return self.secret

    def load_line(self, router: str | None, cursor: int) -> tuple[bytes, int]:
        """A line of a load stream, and the cursor for its next one."""
        prefixes, cursor = self.prefixes.since(cursor)
        report = self.load_report(router)
        if not prefixes:
            return msgspec.json.encode(report), cursor
        fields = {name: getattr(report, name) for name in report.__struct_fields__}
        return msgspec.json.encode(LoadLine(**fields, prefixes=prefixes)), cursor

    def load_report(self, router: str | None) -> LoadReport:
        stats, info, settings = self.core.stats, self.info, self.settings
        self._epoch += 1
        velocity = self._velocity.update(stats.prompt_step_tokens, stats.prompt_step_seconds, self.monotonic())
        return LoadReport(
            engine_id=info.engine_id if info is not None else "",
            epoch=self._epoch,
            seen=self._seen.get(router, 0) if router is not None else 0,
            ready=self.unready is None,
            draining=self.draining,
            model=settings.served_name,
            compat_hash=info.compat_hash if info is not None else "",
            max_model_len=info.max_model_len if info is not None else 0,
            running=stats.running,
            waiting=stats.waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            resident_decode_tokens=stats.resident_decode_tokens,
            decoding=stats.decoding,
            decode_step_seconds=round(stats.decode_step_seconds, 6),
            mixed_tokens_per_second=round(stats.mixed_tokens_per_second, 1),
            free_blocks=stats.free_blocks,
            total_blocks=stats.total_blocks or (info.total_blocks if info is not None else 0),
            block_size=info.block_size if info is not None else settings.block_size,
            waiting_pulls=stats.waiting_pulls,
            held_blocks=stats.held_blocks,
            max_running=settings.max_running,
            prefill_tokens_per_second=round(velocity, 1),
            transport=stats.transport,
            kv_bytes_received=stats.transfer_bytes,
            kv_seconds=stats.transfer_seconds,
            prefill_tokens_total=stats.prefill_tokens,
            generated_tokens_total=stats.decode_tokens,
            recomputed_total=stats.recomputed,
        )
