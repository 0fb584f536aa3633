"""Kubernetes' HorizontalPodAutoscaler, one per pool.

Source: kubernetes.io "Horizontal Pod Autoscaling": desired = ceil(current * value / target), no change within a
tolerance of 10 %, a sync each 15 s; by default scale-up by at most 100 % or 4 pods in 15 s, scale-down to the largest
recommendation of the last 300 s. Metrics as its users set them: busy share of the prefill pool and KV use of the decode
pool, target 80 % each.
"""

from __future__ import annotations

import math
from collections import deque

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.policies.base import Plant, split

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
TARGET = 0.8
DOWN_WINDOW_SECONDS = 300.0
UP_PODS = 4


def desired(current: int, value: float, target: float, tolerance: float = TOLERANCE) -> int:
    """The published formula. `value` is the mean over the pool's pods."""
    ratio = value / target
    return current if abs(ratio - 1) <= tolerance else max(1, math.ceil(current * ratio))


class Autoscaler:
    """One HPA: the formula, the scale-up policies and the scale-down window."""

    def __init__(self, current: int, most: int) -> None:
        self.current = current
        self._most = most
        self._recommended: deque[tuple[float, int]] = deque()

    def sync(self, value: float, now: float) -> int:
        if not self._recommended:
            # As the controller does: what is there counts as recommended at its start.
            self._recommended.append((now, self.current))
        wanted = min(self._most, desired(self.current, value, TARGET))
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - DOWN_WINDOW_SECONDS:
            self._recommended.popleft()
        if wanted > self.current:
            self.current = min(wanted, max(2 * self.current, self.current + UP_PODS))
        elif wanted < self.current:
            self.current = min(self.current, max(w for _, w in self._recommended))
        return self.current


class Usage:
    """Busy share of the prefill pool since the call before, and KV use of the decode pool now."""

    def __init__(self) -> None:
        self._busy: dict[str, float] = {}
        self._at = 0.0

    def read(self, observation: Observation) -> tuple[float, float]:
        elapsed = max(observation.taken_at - self._at, 1e-9)
        prefills = observation.serving("prefill")
        busy = [w.busy_seconds - self._busy.get(w.name, 0.0) for w in prefills]
        self._busy = {w.name: w.busy_seconds for w in observation.workers}
        self._at = observation.taken_at
        used = mean([1 - w.free_tokens / max(1, w.capacity_tokens) for w in observation.serving("decode")])
        return mean([min(1.0, b / elapsed) for b in busy]), used


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class Hpa:
    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._prefill = Autoscaler(plant.start_prefill, plant.workers - 1)
        self._decode = Autoscaler(plant.workers - plant.start_prefill, plant.workers - 1)
        self._usage = Usage()
        self._due = 0.0

    def __call__(self, observation: Observation, now: float) -> int | None:
        if now < self._due:
            return None
        self._due = now + SYNC_SECONDS
        busy, used = self._usage.read(observation)
        return split(self._prefill.sync(busy, now), self._decode.sync(used, now), self._plant.workers)
