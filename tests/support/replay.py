"""Small made-up traces for replay tests."""

from __future__ import annotations

import random

from forebay_engine.perf import load
from forebay_operator.replay.cluster import Setup
from forebay_operator.replay.fleet import Gear, role_gear
from forebay_operator.replay.trace import Arrival, Trace
from forebay_operator.replay.worker import WorkerShape

MODEL = load("h100-llama-8b")


def poisson(rate: float, seconds: float, prompt: float, output: float, seed: int = 0, start: float = 0.0) -> Trace:
    """Poisson arrivals with lognormal lengths of the given means."""
    rng = random.Random(seed)
    at = start
    trace = []
    while (at := at + rng.expovariate(rate)) < start + seconds:
        # sigma 0.8: mean = exp(mu + 0.32)
        lengths = [max(1, round(mean * rng.lognormvariate(-0.32, 0.8))) for mean in (prompt, output)]
        trace.append(Arrival(at, lengths[0], lengths[1]))
    return trace


def setup(workers: int = 4, prefill: int = 2, gear: Gear | None = None, *, convertible: bool = False) -> Setup:
    return Setup(
        model=MODEL,
        workers=workers,
        start_prefill=prefill,
        ttft_seconds=1.0,
        tpot_seconds=0.04,
        shape=WorkerShape(mixed_step_seconds=0.036),
        gear=gear or role_gear(),
        convertible=convertible,
    )
