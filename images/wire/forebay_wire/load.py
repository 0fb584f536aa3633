"""The load a worker reports: in every response's header and pushed to each router on GET /internal/load."""

from __future__ import annotations

import msgspec

from forebay_wire.prefix import PrefixEntry

PUSH_INTERVAL_SECONDS = 0.2


class LoadReport(msgspec.Struct, omit_defaults=True, frozen=True):
    engine_id: str
    """Fresh per process start."""

    epoch: int
    """Grows with every report of one process; a router drops a report older than the one it holds."""

    seen: int = 0
    """Requests received from the router that reads this stream: what it sent beyond, the report does not cover yet."""

    ready: bool = False
    draining: bool = False
    model: str = ""
    compat_hash: str = ""
    max_model_len: int = 0
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    """Uncached prompt tokens not yet computed, of waiting and running requests."""

    resident_decode_tokens: int = 0
    """Context tokens of the requests that decode now."""

    decoding: int = 0
    """Requests that the last step made a token for."""

    decode_step_seconds: float = 0.0
    """Of a step that only decodes, as batches are now; 0: nothing decodes, or it is not known yet."""

    mixed_tokens_per_second: float = 0.0
    """Prompt tokens that fit beside the decodes of now without making a step longer than requests allow; 0: unknown."""

    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    waiting_pulls: int = 0
    held_blocks: int = 0
    """Blocks under a lease, waiting for a decode worker's pull."""

    max_running: int = 0
    prefill_tokens_per_second: float = 0.0
    """Measured velocity of steps that compute prompts only; 0 while unknown."""

    transport: str = "Unknown"
    kv_bytes_received: int = 0
    kv_seconds: float = 0.0
    prefill_tokens_total: int = 0
    generated_tokens_total: int = 0
    recomputed_total: int = 0
    """Prompts a decode worker had to compute itself because their KV could not be had (R2)."""


class LoadLine(LoadReport, omit_defaults=True, frozen=True):
    """A line of the load stream: the report, and what came into the worker's prefix cache since the stream's last line.

    Not in LoadReport, which the router shows to anyone on GET /load: a key tells whether a guessed prompt is right.
    """

    prefixes: list[list[PrefixEntry]] = []
    """Beginnings of prompts whose KV was computed or pulled here: a list a prompt, shortest first."""
