"""A replay's choice of workers, where it says more than the router's own tests."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from forebay_engine.perf import load
from forebay_operator.replay.routing import Routing
from forebay_operator.replay.worker import WorkerShape

MODEL = load("h100-llama-8b")
VELOCITY = 28_000.0


def worker(index: int, **values: Any) -> Any:
    usual = {
        "index": index,
        "name": str(index),
        "queued_tokens": 0,
        "in_flight": 0,
        "decoding": 0,
        "waiting_pulls": 0,
        "resident_tokens": 0,
        "free_tokens": MODEL.kv_capacity_tokens,
    }
    return SimpleNamespace(**{**usual, **values})


@pytest.mark.parametrize(
    ("batch", "resident", "share"),
    [
        # Nothing decodes there any more: as good as the other.
        (0, 0, (0.45, 0.55)),
        # Steps as long as the objective allows without any prompt: 16 tokens of one in each.
        (60, 400_000, (0.0, 0.06)),
    ],
)
def test_prompts_avoid_a_worker_that_still_decodes(batch: int, resident: int, share: tuple[float, float]) -> None:
    """A worker became a prefill worker with what it decoded. TPOT is 20 ms; each prompt sent counts in its queue."""
    routing = Routing(MODEL, WorkerShape(mixed_step_seconds=0.018), 0.5, 0.02, convertible=False)
    changed, other = worker(0, decoding=batch, resident_tokens=resident, in_flight=batch), worker(1)
    sent: Counter[int] = Counter()
    for turn in range(200):
        placed = routing.prefill([changed, other], [worker(2)], 1000, VELOCITY, turn)
        assert placed is not None
        sent[placed[0]] += 1
        (changed, other)[placed[0]].queued_tokens += 1000
    assert share[0] <= sent[0] / 200 <= share[1]
