"""Kthena's disaggregatedTarget: a recommendation per role, windows, then the ratio.

Source: volcano-sh/kthena pkg/autoscaler/algorithm/{recommendation,revision,disaggregated_ratio}.go. Per role: ratio =
mean / target; within a tolerance of 10 % no change, else ceil(ratio * pods). Stable-down: not below the largest
recommendation of the window (300 s). Panic, when the recommendation is 200 % of the pods or more: only up. Then the
ratio's repair, biased to scale up. Metrics as for the HPA: busy share and KV use, target 80 %.
"""

from __future__ import annotations

import math
from collections import deque

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.policies.base import Plant, split
from forebay_operator.replay.policies.hpa import Usage

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
TARGET = 0.8
WINDOW_SECONDS = 300.0
PANIC_PERCENT = 200
PANIC_SECONDS = 60.0
RATIO = (1 / 6, 6.0)


def recommend(pods: int, value: float) -> int:
    ratio = value / TARGET
    return pods if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * pods)


def repair(prefill: int, decode: int, most: int, low: float = RATIO[0], high: float = RATIO[1]) -> tuple[int, int]:
    """prefill / decode into [low, high]: the smaller side grows; where that is at its maximum, the other shrinks."""
    if prefill == 0 and decode == 0:
        return 0, 0
    prefill, decode = max(1, prefill), max(1, decode)
    if prefill / decode < low:
        grown = math.ceil(low * decode)
        if grown <= most:
            prefill = grown
        else:
            prefill, decode = most, math.floor(most / low)
    elif prefill / decode > high:
        grown = math.ceil(prefill / high)
        if grown <= most:
            decode = grown
        else:
            prefill, decode = math.floor(high * most), most
    return min(most, prefill), min(most, decode)


class Role:
    def __init__(self, current: int, most: int) -> None:
        self.current = current
        self._most = most
        self._history: deque[tuple[float, int]] = deque()
        self._panic_until = -math.inf

    def sync(self, value: float, now: float) -> int:
        wanted = min(self._most, max(1, recommend(self.current, value)))
        if not self._history:
            self._history.append((now, self.current))
        self._history.append((now, wanted))
        while self._history[0][0] < now - WINDOW_SECONDS:
            self._history.popleft()
        if wanted * 100 >= self.current * PANIC_PERCENT:
            self._panic_until = now + PANIC_SECONDS
        if now < self._panic_until:
            return max(self.current, wanted)
        if wanted < self.current:
            return min(self.current, max(w for _, w in self._history))
        return wanted


class KthenaRatio:
    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        most = plant.workers - 1
        self._prefill = Role(plant.start_prefill, most)
        self._decode = Role(plant.workers - plant.start_prefill, most)
        self._usage = Usage()
        self._due = 0.0

    def __call__(self, observation: Observation, now: float) -> int | None:
        if now < self._due:
            return None
        self._due = now + SYNC_SECONDS
        busy, used = self._usage.read(observation)
        prefill, decode = self._prefill.sync(busy, now), self._decode.sync(used, now)
        prefill, decode = repair(prefill, decode, self._plant.workers - 1)
        self._prefill.current, self._decode.current = prefill, decode
        return split(prefill, decode, self._plant.workers)
