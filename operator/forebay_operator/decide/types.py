"""What the law is told besides the observation, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from forebay_operator.api.labels import Pool
from forebay_operator.api.ratio import Ratio

TICK_SECONDS = 5.0
"""How often decide() is meant to be called. It may be called later or twice; it never counts calls."""


class Split(NamedTuple):
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, pool: Pool) -> int:
        return self.prefill if pool == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the workers per role. `total` is what the two make together, `gpus_*` the GPUs of one worker."""

    prefill_min: int = 1
    prefill_max: int = 512
    decode_min: int = 1
    decode_max: int = 512
    ratio_min: Ratio | None = None
    ratio_max: Ratio | None = None
    max_gpus: int | None = None
    prefill_gpus: int = 1
    decode_gpus: int = 1


@dataclass(frozen=True, slots=True)
class Gear:
    """What one move costs."""

    seconds: float
    """Until the worker serves in its new role, its drain left out."""

    drains: bool
    """Replicas: the move begins when the worker's requests have ended, and it serves nothing until then."""

    @property
    def slow(self) -> bool:
        return self.drains or self.seconds > TICK_SECONDS


@dataclass(frozen=True, slots=True)
class Workers:
    """Costs of one worker as known beforehand; what is measured corrects them (fits.py)."""

    prefill_velocity: float
    """Prompt tokens per second in full prefill steps."""

    weights_seconds: float
    """A decode step takes max(compute_seconds * batch, weights_seconds + sequence_seconds * batch + resident_seconds *
    resident tokens) + overhead_seconds."""

    resident_seconds: float
    kv_tokens: int
    compute_seconds: float = 0.0
    sequence_seconds: float = 0.0
    overhead_seconds: float = 0.0
    max_batch: int = 256
    mixed_chunk: int = 512
    """Prompt tokens of a decode worker's mixed step."""

    mixed_seconds: float = math.inf
    """How long such a step takes."""


class Rate(NamedTuple):
    """HPA's scaling policy: at most `value` workers, or per cent of the workers there are, within the period."""

    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: float

    def most(self, workers: int) -> int:
        """Of so many."""
        return self.value if self.type == "Pods" else math.ceil(workers * self.value / 100)


@dataclass(frozen=True, slots=True)
class Rules:
    """HPA's scaling rules of one direction. None: the law's own figure."""

    stabilization_seconds: float | None = None
    select: Literal["Max", "Min", "Disabled"] = "Max"
    rates: tuple[Rate, ...] = ()
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """That the total may change, and how."""

    up: Rules = Rules(rates=(Rate("Pods", 2, 60.0),))
    down: Rules = Rules(rates=(Rate("Pods", 1, 60.0),))
    start_seconds: float = 120.0
    """From a wanted replica to a ready worker: configured, then measured by the caller."""

    pending_seconds: float = 600.0
    """A pod that is not ready after this long is given up."""

    bounds: Bounds | None = None
    """Of the home pools, where those differ from the policy's, which are the roles'."""

    homes_serve: bool = False
    """Workers serve at home only: the ratio bounds the pools' sizes, and not just what they add up to."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """One home pool, as it is."""

    wanted: int
    """The Deployments' replicas."""

    ready: int
    pending_since: float | None = None
    """When the oldest pod that is not ready yet was made; None: all are ready."""

    terminating: int = 0
    """Pods that are leaving: they hold their GPUs until they are gone."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Replicas to hold from now on, and why."""

    before: Split
    target: Split
    reason: str
    message: str
    limited_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """The model's spec, as far as the law needs it. Times in seconds."""

    ttft_seconds: float | None
    tpot_seconds: float | None
    gear: Gear
    workers: Workers
    bounds: Bounds = field(default_factory=Bounds)
    convertible: bool = False
    """The router lets decoders take prompts when the prefill queue is long."""

    mode: Literal["Auto", "Recommend", "Off"] = "Auto"
    pause: Literal["None", "All", "ScaleUp", "ScaleDown"] = "None"
    """Of the prefill role, since the decode role moves the other way: ScaleUp keeps it from growing, ScaleDown from
    shrinking."""

    moves_per_minute: int = 12
    """Rate limit of the pair: workers that change roles within a minute, at most."""

    move_rules: tuple[Rules, ...] = ()
    """Rates in place of that one, for moves either way. A move has to fit all of these rules."""

    growth: Growth | None = None
    """None: the number of workers is given, and only their split is decided."""

    attainment: float = 0.98
    """Share of requests that should meet both objectives."""

    stale_seconds: float = 30.0
    """An observation older than this is not acted on."""


@dataclass(frozen=True, slots=True)
class Option:
    """A split that was considered."""

    split: Split
    cost: float
    """Expected share of requests that miss an objective, the price of the move included."""

    gain: float
    """Against staying; below 0: worse."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The targets to hold from now on, and why. `target` is always within the policy's bounds, or equal to `before`."""

    at: float
    before: Split
    target: Split
    reason: str
    message: str
    limited_by: tuple[str, ...] = ()
    inputs: dict[str, float] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    """What was considered, best first."""

    sizing: Sizing | None = None
    """Replicas of the home pools to hold; None: not decided (no growth, or nothing fit to decide on)."""

    apply: bool = True
    """False in mode Recommend: written to status only."""

    @property
    def moves(self) -> int:
        return abs(self.target.prefill - self.before.prefill)
