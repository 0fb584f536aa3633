"""Fixed splits and the plain demand law."""

from __future__ import annotations

import math

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.policies.base import Plant, Window, split

TARGET = 0.8
"""Utilisation that both pools are sized for."""


class Fixed:
    """Never moves after it has reached its split."""

    def __init__(self, prefill: int) -> None:
        self.prefill = prefill

    def __call__(self, observation: Observation, now: float) -> int | None:
        return self.prefill


class Demand:
    """ceil(demand / 0.8) per pool, each 5 s, without hysteresis.

    Prefill demand: offered prompt tokens per second of the last 30 s over the velocity. Decode demand: resident tokens,
    and those of requests that wait for a place, over what a worker holds at the TPOT objective. The balance equation of
    DistServe (OSDI'24) and TokenScale (arXiv 2512.03416).
    """

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._window = Window(30.0)

    def __call__(self, observation: Observation, now: float) -> int | None:
        self._window.add(observation)
        prefill, decode = self.demand(observation)
        return split(math.ceil(prefill / TARGET), math.ceil(decode / TARGET), self._plant.workers)

    def demand(self, observation: Observation) -> tuple[float, float]:
        """Workers' worth of load per pool."""
        prefill = self._window.prompt_tokens / self._window.span / self._plant.prefill_velocity
        resident = sum(w.resident_tokens for w in observation.workers)
        decoding = sum(w.decoding for w in observation.workers)
        waiting = sum(w.waiting_pulls for w in observation.workers)
        if waiting:
            mean = resident / decoding if decoding else self._window.prompt_tokens / max(1, self._window.requests)
            resident += round(waiting * mean)
        return prefill, resident / max(1.0, self._plant.resident_capacity)
