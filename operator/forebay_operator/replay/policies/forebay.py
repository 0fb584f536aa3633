"""decide() in a replay: the law that the operator and local mode run."""

from __future__ import annotations

import time
from dataclasses import replace

from forebay_operator.calibrate.believed import workers_of
from forebay_operator.decide import Bounds, Decision, Gear, Memory, Policy, decide
from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.policies.base import Plant
from forebay_operator.replay.worker import mixed_chunk


def policy_of(plant: Plant, bounds: Bounds | None = None) -> Policy:
    """The law's policy for a replay's workers. The plant's biases are in it: a law that was told wrong figures."""
    model = plant.model
    chunk = min(mixed_chunk(model, 32, 32 * 2048, 0, plant.mixed_step_seconds), plant.max_batched_tokens)
    return Policy(
        ttft_seconds=plant.ttft_seconds,
        tpot_seconds=plant.tpot_seconds,
        gear=Gear(plant.gear_seconds, plant.drains),
        workers=replace(
            workers_of(
                model,
                prompt_tokens=plant.max_batched_tokens,
                max_batch=plant.max_running,
                slower=1 / plant.decode_bias,
            ),
            prefill_velocity=plant.prefill_velocity,
            mixed_chunk=chunk,
            mixed_seconds=model.step_seconds([(chunk, 0)], 32, 32 * 2048),
        ),
        bounds=bounds or Bounds(),
        convertible=plant.convertible,
    )


class Forebay:
    def __init__(self, plant: Plant, bounds: Bounds | None = None) -> None:
        self.policy = policy_of(plant, bounds)
        self.memory = Memory()
        self.decisions: list[Decision] = []
        """Every one that moved something."""

        self.reasons: dict[str, int] = {}
        self.calls = 0
        self.seconds = 0.0

    def __call__(self, observation: Observation, now: float) -> int | None:
        began = time.perf_counter()
        decision, self.memory = decide(observation, self.policy, self.memory, now)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1
        if decision.target != decision.before:
            self.decisions.append(decision)
        return decision.target.prefill
