"""What is measured, and from it a performance model. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from forebay_engine.perf import PerfModel
from forebay_engine.perf.fit import Sample, errors, fit

_DECODE_FIELDS = ("weights_seconds", "sequence_seconds", "resident_seconds")
_PREFILL_FIELDS = ("token_seconds", "attention_seconds", "prefill_overhead_seconds")
_ITEMSIZE = 2


class CalibrationError(ValueError):
    """The pool can't be measured, or what was measured makes no model; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """One pull between two workers."""

    bytes: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class Measured:
    """Filled while measuring."""

    prefill: list[Sample] = field(default_factory=list)
    """One uncached prompt alone: `seconds` from sending to the first token, HTTP and router included."""

    decode: list[Sample] = field(default_factory=list)
    """`batch` streams on one worker: `seconds` between tokens."""

    handoffs: list[Handoff] = field(default_factory=list)
    role_switch_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """What the model says of one worker but not how fast it is."""

    kv_capacity_tokens: int
    ttft_objective_seconds: float
    tpot_objective_seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    model: PerfModel
    prefill_error: float
    """Median of |predicted / measured - 1|."""

    decode_error: float


def fit_model(measured: Measured, worker: Worker, *, name: str, note: str) -> Fit:
    """A performance model of one worker. Raises CalibrationError when too little was measured.

    Decode's part is fitted first: it is memory traffic, which prefill's steps are not (engine perf/model.py).
    """
    if len(measured.prefill) < 3 or len(measured.decode) < 3:
        raise CalibrationError(
            f"{len(measured.prefill)} prompts and {len(measured.decode)} batches were measured, at least 3 of each are "
            "needed; give it more time with --minutes"
        )
    rate, fixed = _link(measured.handoffs)
    start = PerfModel(
        name=name,
        source="fitted",
        note=note,
        layers=1,
        kv_heads=1,
        head_size=_head_size(measured.handoffs),
        itemsize=_ITEMSIZE,
        transfer_bytes_per_second=rate,
        transfer_seconds=fixed,
        kv_capacity_tokens=worker.kv_capacity_tokens,
        ttft_objective_seconds=worker.ttft_objective_seconds,
        tpot_objective_seconds=worker.tpot_objective_seconds,
        role_switch_seconds=measured.role_switch_seconds,
    )
    start = msgspec.structs.replace(start, **_first_guess(measured))
    model = fit(start, measured.decode, _DECODE_FIELDS)
    model = fit(model, measured.prefill, _PREFILL_FIELDS)
    values = msgspec.structs.asdict(model)
    model = msgspec.structs.replace(model, **{k: float(f"{v:.4g}") for k, v in values.items() if isinstance(v, float)})
    return Fit(model, _median_error(model, measured.prefill), _median_error(model, measured.decode))


def _median_error(model: PerfModel, samples: Sequence[Sample]) -> float:
    return statistics.median(abs(error) for error in errors(model, samples))


def _first_guess(measured: Measured) -> dict[str, float]:
    """Where the search begins: every coefficient above 0, of the right order."""
    fastest = min(sample.seconds for sample in measured.decode)
    longest = max(measured.prefill, key=lambda sample: sample.chunks[0][0])
    tokens = longest.chunks[0][0]
    token = longest.seconds / tokens
    most = max(measured.decode, key=lambda sample: sample.batch)
    widest = max(sample.resident_tokens for sample in measured.decode)
    return {
        "weights_seconds": fastest / 2,
        "sequence_seconds": fastest / (2 * most.batch),
        "resident_seconds": fastest / (10 * widest),
        "token_seconds": token,
        "attention_seconds": token / (4 * tokens),
        "prefill_overhead_seconds": min(sample.seconds for sample in measured.prefill) / 4,
    }


def _link(handoffs: Sequence[Handoff]) -> tuple[float, float]:
    """(bytes/s, fixed seconds) by least squares; without two sizes the mean rate and no fixed part."""
    total = sum(h.bytes for h in handoffs)
    seconds = sum(h.seconds for h in handoffs)
    if total <= 0 or seconds <= 0:
        return 0.0, 0.0
    sizes = [h.bytes for h in handoffs]
    if max(sizes) > 1.5 * min(sizes):
        slope, fixed = statistics.linear_regression(sizes, [h.seconds for h in handoffs])
        if slope > 0:
            return 1 / slope, max(0.0, fixed)
    return total / seconds, 0.0


def _head_size(handoffs: Sequence[Handoff]) -> int:
    """KV bytes of a token, as one head of one layer: only their product counts for a replay."""
    per_token = [h.bytes / h.tokens for h in handoffs if h.tokens]
    return max(1, round(statistics.median(per_token) / (2 * _ITEMSIZE))) if per_token else 1
