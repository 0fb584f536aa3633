"""What every law gets, and how its two counts become one split of a fixed number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forebay_engine.perf import PerfModel
from forebay_operator.observe.traffic import Arrivals, Observation


@dataclass(frozen=True, slots=True)
class Plant:
    """What a law is told of the workers: what an operator would have measured before."""

    model: PerfModel
    workers: int
    ttft_seconds: float
    tpot_seconds: float
    gear_seconds: float
    drains: bool
    convertible: bool
    max_batched_tokens: int = 2048
    max_running: int = 256
    mixed_step_seconds: float = float("inf")
    prefill_bias: float = 1.0
    """Factor on the prefill velocity that the law is told: 0.7 makes it believe in 30 % less."""

    decode_bias: float = 1.0
    start_prefill: int = 1

    @property
    def prefill_velocity(self) -> float:
        """Prompt tokens per second of one worker, in full steps."""
        return self.prefill_bias * self.max_batched_tokens / self.model.prefill_seconds(self.max_batched_tokens)

    def step_seconds(self, batch: float, resident: float) -> float:
        """One decode step as the law believes it."""
        return self.model.decode_seconds(round(batch), round(resident)) / self.decode_bias

    @property
    def resident_capacity(self) -> float:
        """Context tokens a decode worker may hold: as many as fit, and whose step meets the TPOT objective."""
        fixed = self.model.decode_seconds(1, 0) / self.decode_bias
        slope = self.model.resident_seconds / self.decode_bias
        fits = float(self.model.kv_capacity_tokens)
        return min(fits, max(0.0, self.tpot_seconds - fixed) / slope) if slope > 0 else fits


class Law(Protocol):
    """A law is called every 5 s and answers with the prefill workers it wants; None: no change."""

    def __call__(self, observation: Observation, now: float) -> int | None: ...


def split(prefill: float, decode: float, workers: int) -> int:
    """Prefill workers of a fixed total, in proportion to what the law asked for, each pool at least 1.

    The peers' laws size two pools independently. With the total given, a law that asks for more or less than it keeps
    its proportion; so none is charged for leaving GPUs idle.
    """
    asked = prefill + decode
    if asked <= 0:
        return max(1, workers // 2)
    return min(workers - 1, max(1, round(workers * prefill / asked)))


class Window:
    """The last `seconds` of arrivals."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: list[Arrivals] = []

    def add(self, observation: Observation) -> None:
        self._kept += observation.arrivals
        if self._kept:
            newest = self._kept[-1].at
            self._kept = [a for a in self._kept if a.at > newest - self.seconds]

    @property
    def requests(self) -> int:
        return sum(a.requests for a in self._kept)

    @property
    def prompt_tokens(self) -> int:
        return sum(a.prompt_tokens for a in self._kept)

    @property
    def span(self) -> float:
        """Seconds that are in it; at least 1."""
        return max(1.0, float(len(self._kept)))
