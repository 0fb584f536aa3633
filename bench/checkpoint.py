"""What a law knows after an hour's service, so that what is measured begins with full windows and known speeds."""

from __future__ import annotations

from forebay_engine.perf import load
from forebay_operator.calibrate.believed import workers_of
from forebay_operator.decide import Memory
from forebay_operator.pilot import Checkpoint, finite


def believed(perf: str) -> dict[str, float]:
    """What `perf`'s workers are known to do, as a checkpoint has it."""
    return finite(workers_of(load(perf)))


def after_an_hour(
    perf: str, target: tuple[int, int], now: float, *, requests: int, prompt_tokens: int, output: float
) -> Checkpoint:
    """Of workers as fast as the performance model `perf`, at the end of a minute that ended at `now`.

    In each of its seconds `requests` came, with `prompt_tokens` together; `output`: tokens of an answer.
    """
    memory = Memory(
        target=target,
        started_at=now - 61,
        seen_at=now,
        arrivals=[(float(int(now) - 59 + second), requests, prompt_tokens) for second in range(60)],
        output=output,
    )
    return Checkpoint(memory=memory.dump(), believed=believed(perf))
