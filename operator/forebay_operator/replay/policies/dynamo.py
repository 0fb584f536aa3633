"""NVIDIA Dynamo's planner, its two current laws, with the total pinned (min_gpu_budget = max_gpu_budget).

Source: ai-dynamo/dynamo 1.6.1, components/src/dynamo/planner/core/{load_scaling,throughput_scaling,budget}.py.
A pinned total lets the planner only redistribute: a pool grows when the other one shrinks in the same tick.
"""

from __future__ import annotations

import math

from forebay_operator.observe.traffic import Observation, WorkerLoad
from forebay_operator.replay.policies.base import Plant, Window, split

LOAD_SECONDS = 5.0
THROUGHPUT_SECONDS = 180.0
SENSITIVITY = 0.8
MOST_CANDIDATES = 128


class DynamoLoad:
    """Load loop, SLA flavour, each 5 s.

    Up by one when every engine's estimated latency exceeds its target; down by one when the load of N over N - 1
    engines would still fit: for prefill the queue's part of TTFT below (target - own time) * 0.8, for decode KV below
    its capacity and ITL below target * 0.8. Nothing moves while a worker is between roles.
    """

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._window = Window(60.0)

    def __call__(self, observation: Observation, now: float) -> int | None:
        self._window.add(observation)
        have = observation.targeted("prefill")
        if any(w.role is None for w in observation.workers):
            return None
        prefills, decodes = observation.serving("prefill"), observation.serving("decode")
        prompt = self._window.prompt_tokens / max(1, self._window.requests)
        prefill = self.prefill_step(prefills, prompt)
        decode = self.decode_step(decodes)
        if prefill > 0 and decode < 0 and len(decodes) > 1:
            return have + 1
        if prefill < 0 and decode > 0 and len(prefills) > 1:
            return have - 1
        return None

    def prefill_step(self, workers: list[WorkerLoad], prompt: float) -> int:
        """+1, 0 or -1 engines."""
        own = prompt / self._plant.prefill_velocity
        queues = [w.queued_prefill_tokens / self._plant.prefill_velocity for w in workers]
        if queues and all(queue + own > self._plant.ttft_seconds for queue in queues):
            return 1
        n = len(queues)
        room = (self._plant.ttft_seconds - own) * SENSITIVITY
        if n > 1 and all(queue * n / (n - 1) < room for queue in queues):
            return -1
        return 0

    def decode_step(self, workers: list[WorkerLoad]) -> int:
        plant = self._plant
        loads = [(float(w.decoding + w.waiting_pulls), float(w.resident_tokens)) for w in workers]
        if loads and all(plant.step_seconds(b, r) > plant.tpot_seconds for b, r in loads):
            return 1
        n = len(loads)
        if n > 1:
            more = n / (n - 1)
            fits = all(
                r * more < plant.model.kv_capacity_tokens
                and plant.step_seconds(b * more, r * more) < plant.tpot_seconds * SENSITIVITY
                for b, r in loads
            )
            if fits:
                return -1
        return 0


class DynamoThroughput:
    """Throughput loop, each 180 s, constant predictor.

    replicas = ceil(demand / engine rate). Prefill rate = 1 / TTFT of one prompt when that meets the target; decode rate
    = batch / (output tokens * ITL) with the largest batch whose ITL meets the target at context ISL + OSL / 2. Over the
    budget, prefill shrinks in proportion first and decode takes the remainder.
    """

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._window = Window(THROUGHPUT_SECONDS)
        self._due = THROUGHPUT_SECONDS
        self._generated = 0
        self._finished = 0

    def __call__(self, observation: Observation, now: float) -> int | None:
        self._window.add(observation)
        if now < self._due:
            return None
        self._due = now + THROUGHPUT_SECONDS
        generated, finished = observation.generated_tokens or 0, observation.finished or 0
        answers, tokens = finished - self._finished, generated - self._generated
        self._generated, self._finished = generated, finished
        if answers <= 0 or not self._window.requests:
            return None
        rate = self._window.requests / self._window.span
        prefill, decode = self.replicas(rate, self._window.prompt_tokens / self._window.requests, tokens / answers)
        total = self._plant.workers
        if prefill + decode > total:
            prefill = max(1, min(total - 1, prefill * total // (prefill + decode)))
            return prefill
        return split(prefill, decode, total)

    def replicas(self, requests_per_second: float, isl: float, osl: float) -> tuple[int, int]:
        plant = self._plant
        prefill_rate = plant.prefill_velocity / isl
        context = isl + osl / 2
        most = max(1, min(plant.max_running, int(plant.model.kv_capacity_tokens / context)))
        best = 0.0
        for i in range(MOST_CANDIDATES):
            batch = max(1, round(most * (i + 1) / MOST_CANDIDATES))
            itl = plant.step_seconds(batch, batch * context)
            if itl <= plant.tpot_seconds or batch == 1:
                best = max(best, batch / (osl * itl))
        return max(1, math.ceil(requests_per_second / prefill_rate)), max(1, math.ceil(requests_per_second / best))
