"""Observations for tests of decide(): a source whose load can be set."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay_operator.api.labels import Pool
from forebay_operator.decide import Bounds, Decision, Gear, Memory, Policy, Workers, decide
from forebay_operator.observe.traffic import Arrivals, Observation, WorkerLoad

WORKERS = Workers(
    prefill_velocity=30_000.0,
    weights_seconds=0.0064,
    resident_seconds=5.2e-8,
    compute_seconds=3.25e-5,
    kv_tokens=426_000,
    mixed_chunk=1000,
    mixed_seconds=0.036,
)


def policy(**changes: object) -> Policy:
    values: dict[str, object] = {
        "ttft_seconds": 1.0,
        "tpot_seconds": 0.04,
        "gear": Gear(1.0, drains=False),
        "workers": WORKERS,
        "bounds": Bounds(),
    }
    return Policy(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Source:
    """A cluster in steady state at whatever load it is told: what a decision changes is only the roles."""

    prefill: int = 4
    decode: int = 4
    rate: int = 20
    prompt: int = 1000
    output: int = 200
    queued: int = 0
    at: float = 0.0
    generated: int = 0
    finished: int = 0
    missed: int = 0
    seen: list[Observation] = field(default_factory=list)

    def tick(self, seconds: float = 5.0) -> Observation:
        arrivals = tuple(Arrivals(self.at + i + 1, self.rate, self.rate * self.prompt) for i in range(int(seconds)))
        self.at += seconds
        self.generated += int(self.rate * self.output * seconds)
        self.finished += int(self.rate * seconds)
        # Little's law with a step of 15 ms.
        running = self.rate * self.output * 0.015
        context = self.prompt + self.output / 2
        workers = []
        for i in range(self.prefill + self.decode):
            role: Pool = "prefill" if i < self.prefill else "decode"
            load = running / self.decode if role == "decode" else 0.0
            workers.append(
                WorkerLoad(
                    name=str(i),
                    role=role,
                    target=role,
                    queued_prefill_tokens=self.queued // self.prefill if role == "prefill" else 0,
                    requests=round(load),
                    decoding=round(load),
                    resident_tokens=round(load * context),
                    free_tokens=max(0, 426_000 - round(load * context)),
                    capacity_tokens=426_000,
                )
            )
        observation = Observation(
            taken_at=self.at,
            arrivals=arrivals,
            generated_tokens=self.generated,
            finished=self.finished,
            refused=0,
            missed_ttft=self.missed,
            missed_tpot=0,
            workers=tuple(workers),
        )
        self.seen.append(observation)
        return observation

    def move(self, prefill: int) -> None:
        total = self.prefill + self.decode
        self.prefill, self.decode = prefill, total - prefill


def settle(source: Source, law: Policy, ticks: int = 14) -> tuple[Decision, Memory]:
    memory = Memory()
    for _ in range(ticks):
        decision, memory = decide(source.tick(), law, memory, source.at)
        source.move(decision.target.prefill)
    return decision, memory


def follow(source: Source, law: Policy, memory: Memory, ticks: int) -> tuple[list[Decision], Memory]:
    decisions = []
    for _ in range(ticks):
        decision, memory = decide(source.tick(), law, memory, source.at)
        source.move(decision.target.prefill)
        decisions.append(decision)
    return decisions, memory


def overload(source: Source, law: Policy, memory: Memory, ticks: int) -> tuple[list[Decision], Memory]:
    """180 prompts a second: six workers' worth, so that the queue of four grows by two worker-seconds a second."""
    source.rate = 180
    decisions = []
    for _ in range(ticks):
        source.queued = max(0, source.queued + 5 * (180_000 - 30_000 * source.prefill))
        found, memory = follow(source, law, memory, 1)
        decisions += found
    return decisions, memory
