"""What the rescaling law sees of one model: one frozen Observation, whatever source it was gathered from.

Counters are totals since their source started; a smaller value than before means a reset. A figure that could not be
had is None: zero is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forebay_operator.api.labels import Pool
from forebay_operator.observe.missed import MissedIn


class Health(StrEnum):
    """What a signal is worth. Zero is a measurement; the others are six different ways of not having one."""

    FRESH = "Fresh"
    ZERO = "Zero"
    MISSING = "Missing"
    """Never had from this source."""

    STALE = "Stale"
    """Had once, and too old by now; or it stands still while what it counts goes on."""

    RESET = "Reset"
    """The source started anew: what it counted since is taken, what it lost is not known."""

    COLD = "Cold"
    """The worker is too young for its speed to be learnt from."""

    INVALID = "Invalid"
    """Not what such a source may say: no number, below zero, absurd, or no answer of this kind at all."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One source of an Observation and how far it can be trusted."""

    name: str
    """`router assistant-router-0`, `worker prefill-1 load`, `worker prefill-1 fits`."""

    source: str
    """`/load`, `/metrics` or `Prometheus`."""

    health: Health
    age_seconds: float | None = None
    """Of the newest value, by the observer's clock or relative to the source's own; None: there is none."""

    samples: int = 0
    """Values taken from it so far."""

    needed: bool = True
    """Whether nothing may be decided without it. The workers' fits can be done without: they are learnt slowly."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Offered load of one second, refused requests included."""

    at: float
    """End of the second, on the observer's clock."""

    requests: int
    prompt_tokens: int
    """Not in the prefix cache."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    name: str
    role: Pool | None
    """What the router uses it for; None while it is starting, draining or between roles."""

    target: Pool
    """The role it has or is on its way to."""

    queued_prefill_tokens: int = 0
    requests: int = 0
    """Running, waiting, pulling, and KV held for another worker's pull."""

    decoding: int = 0
    """Of them in the decode phase here."""

    waiting_pulls: int = 0
    resident_tokens: int = 0
    """Context tokens of those that decode."""

    free_tokens: int = 0
    capacity_tokens: int = 0
    prefill_tokens: int = 0
    """Counter: tokens of steps that computed prompts only..."""

    prefill_seconds: float = 0.0
    """...and the time of these steps: the velocity."""

    busy_seconds: float = 0.0
    """Counter: all steps."""

    decode_seconds: float = 0.0
    """Counters over pure decode steps: their time, number, batches and resident tokens."""

    decode_steps: int = 0
    decode_batch: int = 0
    decode_resident: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    taken_at: float
    """On the clock that `now` comes from."""

    arrivals: tuple[Arrivals, ...] = ()
    """Whole seconds since the observation before, oldest first."""

    generated_tokens: int | None = None
    """Counters over all requests..."""

    finished: int | None = None
    refused: int | None = None
    missed_ttft: int | None = None
    """...and of those that finished or were refused: TTFT missed; the TTFT held and TPOT missed."""

    missed_tpot: int | None = None
    missed_in: MissedIn | None = None
    """All misses, by what took the time. None where a router is too old to tell: nothing but explanations needs it."""

    ttft_p95_seconds: float | None = None
    """Of the requests of the last 60 s."""

    tpot_p95_seconds: float | None = None
    workers: tuple[WorkerLoad, ...] = ()
    signals: tuple[Signal, ...] = ()
    """Empty where the source is not judged (a replay)."""

    def serving(self, role: Pool) -> list[WorkerLoad]:
        return [worker for worker in self.workers if worker.role == role]

    def targeted(self, role: Pool) -> int:
        return sum(1 for worker in self.workers if worker.target == role)
