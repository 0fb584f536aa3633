"""When an answer ends."""

from __future__ import annotations

from forebay_engine.types import SamplingParams


def finish_reason(params: SamplingParams, output_tokens: int, token: int, total_tokens: int, limit: int) -> str | None:
    """`stop`, `length` or None, after `token` became output number `output_tokens` (counted from 1).

    `total_tokens` is prompt and output together, `limit` their greatest allowed sum. The first min_tokens tokens never
    end an answer by a stop id (the sampler masks them out; this holds for any sampler).
    """
    if token in params.stop_token_ids and output_tokens > params.min_tokens:
        return "stop"
    if output_tokens >= params.max_tokens or total_tokens >= limit:
        return "length"
    return None
