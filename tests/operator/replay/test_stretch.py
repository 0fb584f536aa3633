"""A stretch's closed forms against its steps, one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from forebay_engine.perf import load
from forebay_operator.replay.stretch import Stretch

MODEL = load("h100-llama-8b")


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 256),
    resident=st.integers(256, 400_000),
    slower=st.sampled_from([1.0, 30.0, 300.0]),
    growing=st.sampled_from([0.0, 1.0, 20.0]),
    steps=st.integers(1, 300),
    share=st.floats(0, 1.2),
)
def test_closed_forms_are_sums_of_steps(
    batch: int, resident: int, slower: float, growing: float, steps: int, share: float
) -> None:
    """`slower`: compute, so that it bounds some steps, or all, before memory does."""
    model = structs.replace(
        MODEL, token_seconds=MODEL.token_seconds * slower, resident_seconds=MODEL.resident_seconds * growing
    )
    stretch = Stretch(model, batch, resident)
    durations = [model.decode_seconds(batch, resident + batch * i) for i in range(steps)]
    assert stretch.seconds(steps) == pytest.approx(math.fsum(durations), rel=1e-9)

    elapsed = share * math.fsum(durations)
    ended = sum(math.fsum(durations[: i + 1]) <= elapsed for i in range(steps))
    assert abs(stretch.ended(elapsed, steps) - ended) <= any(
        abs(math.fsum(durations[: i + 1]) - elapsed) < 1e-9 for i in range(steps)
    )

    limit = durations[0] + share * (durations[-1] - durations[0]) + 1e-9
    longer = sum(duration > limit for duration in durations)
    near = sum(abs(duration - limit) < 1e-9 for duration in durations)
    assert abs(stretch.longer(steps, limit) - longer) <= near
