"""What the law is told besides the observation, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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

    apply: bool = True
    """False in mode Recommend: written to status only."""

    @property
    def moves(self) -> int:
        return abs(self.target.prefill - self.before.prefill)
