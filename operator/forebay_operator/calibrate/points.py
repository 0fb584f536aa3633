"""Which prompts and batches to measure. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_TOKENS = (32, 128, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 1024, 4096)
ANSWER_TOKENS = 48
"""Of each stream in a decode point."""

MAX_PROMPT_SECONDS = 10.0
"""A longer prompt tells little more and takes the time of many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker."""

    max_model_len: int
    kv_capacity_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class DecodePoint:
    batch: int
    """Streams on one worker."""

    context: int


def prefill_lengths(limits: Limits) -> list[int]:
    """Prompt lengths in tokens, shortest first. The longest leaves room for an answer and for being estimated."""
    most = min(limits.max_model_len - 64, limits.kv_capacity_tokens // 2)
    lengths = [n for n in PREFILL_TOKENS if n <= most]
    # A pool of short contexts still needs three lengths for three coefficients.
    return lengths if len(lengths) >= 3 else sorted({max(1, most // 8), max(1, most // 3), max(1, most)})


def decode_points(limits: Limits) -> list[DecodePoint]:
    """Batches and contexts that fit, the most telling first: the corners, then what lies between."""
    fits = [
        DecodePoint(batch, context)
        for context in CONTEXTS
        for batch in BATCHES
        if batch <= limits.max_running
        and context + ANSWER_TOKENS + 64 <= limits.max_model_len
        and batch * (context + ANSWER_TOKENS + 64) <= 0.8 * limits.kv_capacity_tokens
    ]
    if not fits:
        return []
    by_context = {context: [p for p in fits if p.context == context] for context in CONTEXTS}
    corners = [p for points in by_context.values() if points for p in (points[0], points[-1])]
    return list(dict.fromkeys(corners + fits))
