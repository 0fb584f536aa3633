"""What a performance model's worker can hold, for tests that compare against it."""

from __future__ import annotations

from forebay_engine.perf.model import PerfModel


def decode_capacity(model: PerfModel, context: int) -> int:
    """The largest batch of sequences with `context` tokens each that meets the TPOT objective and fits the KV."""
    low, high = 0, model.kv_capacity_tokens // max(1, context)
    while low < high:
        middle = (low + high + 1) // 2
        if model.decode_seconds(middle, middle * context) <= model.tpot_objective_seconds:
            low = middle
        else:
            high = middle - 1
    return low
