"""From a performance model to what the law believes of a worker: of a replay's, and of spec.scaling's. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

from forebay_engine.perf import PerfModel, parse
from forebay_operator.decide.types import Workers

FIELD: Final = "spec.scaling.performanceModel"
REMEDY: Final = "give the text of a file that forebay calibrate wrote, as it is"
PROMPT_TOKENS: Final = 2048
"""Of a full prefill step, whose velocity is believed at first: what the worker computes at once corrects it."""

MAX_BATCH: Final = 256
"""Of a worker that has not reported yet, where the spec does not say."""


def workers_of(
    model: PerfModel, *, prompt_tokens: int = PROMPT_TOKENS, max_batch: int = MAX_BATCH, slower: float = 1.0
) -> Workers:
    """`prompt_tokens` make a full prefill step; decode steps take `slower` times as long as the model says.

    Raises ValueError for a model in which a phase takes no time: it has no speed.
    """
    prefill, step = model.prefill_seconds(prompt_tokens), model.decode_seconds(1, 0)
    if prefill <= 0:
        raise ValueError(f"{prompt_tokens} prompt tokens take 0 s; token_seconds must be over 0")
    if step <= 0:
        raise ValueError("a decode step takes 0 s; weights_seconds must be over 0")
    return Workers(
        prefill_velocity=prompt_tokens / prefill,
        weights_seconds=model.weights_seconds * slower,
        sequence_seconds=model.sequence_seconds * slower,
        resident_seconds=model.resident_seconds * slower,
        compute_seconds=model.token_seconds * slower,
        overhead_seconds=model.overhead_seconds * slower,
        kv_tokens=model.kv_capacity_tokens,
        max_batch=max_batch,
    )


def read_speeds(text: str, max_batch: int = MAX_BATCH) -> Workers:
    """Of the field's text. Raises ValueError naming FIELD, what is wrong in it, the limit and the remedy."""
    try:
        return workers_of(parse(text), max_batch=max_batch)
    except ValueError as error:
        raise ValueError(f"{FIELD}: {error}; {REMEDY}") from None


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
