"""Is an observation fit to act on? Missing, stale, reset, zero and absurd are told apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from forebay_operator.decide import reasons
from forebay_operator.decide.memory import Memory
from forebay_operator.decide.types import Policy
from forebay_operator.observe.traffic import Health, Observation, WorkerLoad

_HOLDS = {
    Health.MISSING: reasons.METRICS_MISSING,
    Health.STALE: reasons.METRICS_STALE,
    Health.INVALID: reasons.METRICS_INVALID,
}

MOST = 1e15
"""No counter, token count or time of a sane source is larger."""

_NUMBERS = tuple(f.name for f in fields(WorkerLoad) if f.name not in ("name", "role", "target"))


def unfit(observation: Observation, policy: Policy, memory: Memory, now: float) -> tuple[str, str] | None:
    """(reason, message) why this observation must not be acted on, or None."""
    if not math.isfinite(observation.taken_at):
        return reasons.METRICS_INVALID, f"the observation's time is {observation.taken_at}"
    for signal in observation.signals:
        if signal.needed and signal.health in _HOLDS:
            return _HOLDS[signal.health], f"{signal.name} ({signal.source}): {signal.note}; targets hold"
    age = now - observation.taken_at
    if age > policy.stale_seconds:
        return (
            reasons.METRICS_STALE,
            f"the newest observation is {age:.0f} s old, at most {policy.stale_seconds:g} s are trusted; targets hold",
        )
    if age < -policy.stale_seconds:
        return reasons.METRICS_INVALID, f"the observation is {-age:.0f} s ahead of this clock; targets hold"
    counters = {
        "generated_tokens": observation.generated_tokens,
        "finished": observation.finished,
        "refused": observation.refused,
        "missed_ttft": observation.missed_ttft,
        "missed_tpot": observation.missed_tpot,
    }
    for name, value in counters.items():
        if value is None:
            return reasons.METRICS_MISSING, f"{name} is missing; targets hold"
    values: list[tuple[str, float | None]] = list(counters.items())
    for second in observation.arrivals:
        values += [("arrivals.at", second.at), ("arrivals.requests", second.requests)]
        values.append(("arrivals.prompt_tokens", second.prompt_tokens))
    for worker in observation.workers:
        values += [(f"worker {worker.name}: {name}", getattr(worker, name)) for name in _NUMBERS]
    for name, number in values:
        if number is None or not 0 <= number <= MOST:
            return reasons.METRICS_INVALID, f"{name} is {number}; it must be from 0 to {MOST:g}; targets hold"
    for role in ("prefill", "decode"):
        if not any(worker.target == role for worker in observation.workers):
            return reasons.METRICS_MISSING, f"no worker of the {role} pool reports; targets hold"
    if memory.totals and _reset(observation, memory):
        return reasons.COUNTER_RESET, "a source's counters went backwards: it restarted; targets hold for a window"
    return None


def _reset(observation: Observation, memory: Memory) -> bool:
    last = memory.totals[-1]
    pairs: Iterable[tuple[int | None, int]] = (
        (observation.generated_tokens, last.generated),
        (observation.finished, last.finished),
        (observation.refused, last.refused),
    )
    return observation.taken_at > last.at and any(new is not None and new < old for new, old in pairs)
