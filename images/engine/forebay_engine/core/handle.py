"""What the HTTP server sees of the core, whichever side of a process border it runs on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from forebay_engine.types import EngineRequest, FailEvent, TokenEvent
from forebay_wire.messages import (
    CompleteResponse,
    Handshake,
    HeartbeatResponse,
    LeaseRef,
    ProgressRequest,
    ProgressResponse,
    ReserveRequest,
    ReserveResponse,
)


class TransferTotals(msgspec.Struct, frozen=True):
    """What was pulled over one transport since start; `seconds` are those of the pulls that brought `bytes`."""

    bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


class CoreStats(msgspec.Struct, tag=True, frozen=True):
    """A snapshot the core sends after steps (at most every 50 ms) and at least once a second. Totals since start."""

    taken: int = 0
    """Requests that the step thread has taken in..."""

    taken_tokens: int = 0
    """...and their prompt tokens, of those whose KV is not pulled. StepLoop.up_to_date() adds what came later."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    resident_decode_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    held_blocks: int = 0
    doubtful_blocks: int = 0
    """Set aside: a read that was given up may still write to them (TransferError.unsettled)."""

    waiting_pulls: int = 0
    prefill_tokens: int = 0
    prefill_busy_seconds: float = 0.0
    prompt_step_tokens: int = 0
    """Of steps that computed prompts only, and their time: what a velocity is made of. A mixed step's length is set by
    what else is in it."""

    prompt_step_seconds: float = 0.0
    cached_tokens: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_busy_seconds: float = 0.0
    decode_step_sequences: int = 0
    """Sums over decode steps: batches and the context tokens in them. `decode_tokens` counts mixed steps too."""

    decode_step_resident: int = 0
    decoding: int = 0
    """Requests that the last step made a token for; 0 when nothing runs."""
    decode_step_seconds: float = 0.0
    """Of a step that only decodes, as of now; 0 when nothing does, or not known yet."""
    mixed_tokens_per_second: float = 0.0
    """Prompt tokens that fit beside the decodes of now; 0: unknown."""
    preemptions: int = 0
    recomputed: int = 0
    leases_expired: int = 0
    transport: str = "Unknown"
    """In use now."""

    transfers: dict[str, TransferTotals] = {}
    """By the transport that was in use at the time."""

    @property
    def transfer_bytes(self) -> int:
        return sum(totals.bytes for totals in self.transfers.values())

    @property
    def transfer_seconds(self) -> float:
        return sum(totals.seconds for totals in self.transfers.values())


class CoreInfo(msgspec.Struct, tag=True, frozen=True):
    """Known once the model is loaded."""

    engine_id: str
    compat_hash: str
    max_model_len: int
    vocab_size: int
    block_size: int
    total_blocks: int
    dtype: str
    transport: str


class CoreDied(RuntimeError):
    """The core process is gone; the server answers 500 to what runs and ends itself, so that it is restarted whole."""


class CoreHandle(Protocol):
    """One core. Methods are called on the server's event loop; every await may raise CoreDied."""

    async def start(self) -> CoreInfo:
        """Load the model; returns when steps can run. Raises ModelError with the cause when it cannot."""

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenEvent | FailEvent]:
        """Events of one request; ends after the event with a finish_reason, or a FailEvent.

        Closing the iterator early (client gone) aborts the request.
        """

    def abort(self, request_id: str) -> None: ...

    @property
    def stats(self) -> CoreStats:
        """The latest snapshot."""

    async def handshake(self) -> Handshake: ...

    async def heartbeat(self, leases: list[LeaseRef]) -> HeartbeatResponse: ...

    async def complete(self, lease: LeaseRef) -> CompleteResponse: ...

    async def cancel(self, request_id: str) -> None:
        """Free the lease of a request whose second leg will not come; a running prefill is aborted."""

    async def progress(self, request: ProgressRequest) -> ProgressResponse: ...

    async def reserve(self, request: ReserveRequest) -> ReserveResponse: ...

    async def release(self, request_id: str) -> None: ...

    def set_draining(self, draining: bool) -> None: ...

    async def close(self) -> None: ...
