"""llm-d's token-aware law for P/D pools, as KEDA and an HPA run it.

Source: llm-d guides, workload autoscaling, keda-epp-token-aware: prefill = ceil(uncached prompt tokens in flight /
velocity / threshold), threshold = TTFT objective - a prompt's own prefill time, 65 % of it for a p90; decode = ceil(sum
of KV use / 0.8). Scale-up one pod each 180 s, scale-down one each 300 s, pools independent.
"""

from __future__ import annotations

import math

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.policies.base import Plant, Window, split

KV_TARGET = 0.8
P90_SHARE = 0.65
UP_SECONDS = 180.0
DOWN_SECONDS = 300.0
SYNC_SECONDS = 15.0


class Limited:
    """One pod at a time, each direction with its period."""

    def __init__(self, current: int) -> None:
        self.current = current
        self._up_at = self._down_at = -math.inf

    def sync(self, wanted: int, now: float) -> int:
        if wanted > self.current and now - self._up_at >= UP_SECONDS:
            self.current, self._up_at = self.current + 1, now
        elif wanted < self.current and now - self._down_at >= DOWN_SECONDS:
            self.current, self._down_at = self.current - 1, now
        return self.current


class LlmdToken:
    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._window = Window(60.0)
        self._prefill = Limited(plant.start_prefill)
        self._decode = Limited(plant.workers - plant.start_prefill)
        self._due = 0.0

    def __call__(self, observation: Observation, now: float) -> int | None:
        self._window.add(observation)
        if now < self._due:
            return None
        self._due = now + SYNC_SECONDS
        most = self._plant.workers - 1
        prefill, decode = self.wanted(observation)
        return split(
            self._prefill.sync(min(most, prefill), now), self._decode.sync(min(most, decode), now), self._plant.workers
        )

    def wanted(self, observation: Observation) -> tuple[int, int]:
        prompt = self._window.prompt_tokens / max(1, self._window.requests)
        velocity = self._plant.prefill_velocity
        threshold = max(0.05, self._plant.ttft_seconds - prompt / velocity) * P90_SHARE
        queued = sum(w.queued_prefill_tokens for w in observation.workers)
        used = sum(1 - w.free_tokens / max(1, w.capacity_tokens) for w in observation.serving("decode"))
        return max(1, math.ceil(queued / velocity / threshold)), max(1, math.ceil(used / KV_TARGET))
