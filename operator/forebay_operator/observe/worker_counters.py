"""A worker's /metrics: the totals that its speed is learnt from. Pure.

Only the lines that are wanted are parsed: a page of vLLM has over a thousand others, and every worker's is read each
15 s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from forebay_wire import metrics as names

MOST: Final = 1e15
"""Of any counter, gauge or sum on a page."""


class BadMetrics(ValueError):
    """Not a page of the metrics that such a worker has; the text names what is missing or wrong."""


class Counters(NamedTuple):
    """Since the worker started. Seconds and tokens of steps that did nothing else: a speed follows from them."""

    prompt_tokens: float
    prompt_seconds: float
    decode_steps: float
    decode_seconds: float
    decode_sequences: float
    """Sum of the steps' batches."""

    decode_resident: float
    """Sum of the steps' context tokens."""

    busy_seconds: float

    def since(self, before: Counters) -> Counters | None:
        """None when a counter went backwards: the worker started anew."""
        gone = Counters(*(now - then for now, then in zip(self, before, strict=True)))
        return gone if min(gone) >= 0 else None

    @property
    def in_range(self) -> bool:
        """Whether each is from 0 to MOST. NaN is not."""
        return all(0 <= value <= MOST for value in self)

    def plus(self, more: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(self, more, strict=True)))


NONE: Final = Counters(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Page:
    """What one look at a worker gave."""

    totals: Counters
    batch: float | None = None
    """Set where the source counts tokens, not steps (vLLM): the batch and its mean context now, which have to stand for
    the time since the last look."""

    context: float = 0.0

    def since(self, before: Page) -> Counters | None:
        gone = self.totals.since(before.totals)
        if gone is None or self.batch is None:
            return gone
        seconds = gone.decode_seconds / self.batch
        return gone._replace(
            decode_steps=gone.decode_sequences / self.batch,
            decode_seconds=seconds,
            decode_resident=gone.decode_sequences * self.context,
            busy_seconds=gone.prompt_seconds + seconds,
        )


ENGINE: Final[Mapping[str, str]] = {
    names.ENGINE_PROMPT_STEP_TOKENS: "prompt_tokens",
    names.ENGINE_PROMPT_STEP_SECONDS: "prompt_seconds",
    names.ENGINE_DECODE_STEPS: "decode_steps",
    names.ENGINE_DECODE_BUSY: "decode_seconds",
    names.ENGINE_DECODE_STEP_SEQUENCES: "decode_sequences",
    names.ENGINE_DECODE_STEP_RESIDENT: "decode_resident",
    names.ENGINE_PREFILL_BUSY: "prefill_busy",
}
VLLM: Final[Mapping[str, str]] = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:request_prefill_time_seconds_sum": "prompt_seconds",
    "vllm:inter_token_latency_seconds_sum": "gap_seconds",
    "vllm:inter_token_latency_seconds_count": "gaps",
    "vllm:num_requests_running": "running",
    "vllm:kv_cache_usage_perc": "usage",
}
"""vLLM has no step counters. A gap between two tokens of a request is a step, so their number is the sum of batches."""


def parse_page(page: bytes) -> Page:
    """Our engine's page or vLLM's, told apart by their names. Raises BadMetrics."""
    text = page.decode("utf-8", "replace")
    ours = names.ENGINE_DECODE_STEPS in text
    prefix, wanted = ("forebay_engine_", ENGINE) if ours else ("vllm:", VLLM)
    return page_of(_sums(text, prefix, wanted), wanted, {} if ours else _label(text, "vllm:cache_config_info"))


def page_of(found: Mapping[str, float], wanted: Mapping[str, str], cache: Mapping[str, str]) -> Page:
    """From the sums of each wanted field. `wanted` is ENGINE or VLLM; `cache`: labels of vLLM's cache_config_info."""
    missing = [name for name, field in wanted.items() if field not in found]
    if missing:
        raise BadMetrics(f"{missing[0]} is not there")
    return _ours(found) if wanted is ENGINE else _of_vllm(found, cache)


def _sums(text: str, prefix: str, wanted: Mapping[str, str]) -> dict[str, float]:
    """Sum over the label sets of each wanted name (vLLM labels by engine)."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        bracket = line.find("{")
        name = line[:bracket] if bracket >= 0 else line.partition(" ")[0]
        field = wanted.get(name)
        if field is None:
            continue
        rest = line[line.rfind("}") + 1 :] if bracket >= 0 else line[len(name) :]
        word = rest.split(maxsplit=1)[0] if rest.strip() else ""
        found[field] = found.get(field, 0.0) + _number(name, word)
    return found


def _number(name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise BadMetrics(f"{name} is {word[:32]!r}, no number") from None
    if not (math.isfinite(value) and 0 <= value <= MOST):
        raise BadMetrics(f"{name} is {word[:32]}; it must be from 0 to {MOST:g}")
    return value


def _ours(found: Mapping[str, float]) -> Page:
    values = {field: found[field] for field in Counters._fields if field in found}
    return Page(Counters(**values, busy_seconds=found["prefill_busy"] + found["decode_seconds"]))


def _of_vllm(found: Mapping[str, float], cache: Mapping[str, str]) -> Page:
    try:
        capacity = float(cache["num_gpu_blocks"]) * float(cache["block_size"])
    except (KeyError, ValueError):
        capacity = 0.0
    if not 0 <= capacity <= MOST:
        # Labels are any text: "nan" and "1e309" are numbers to float().
        capacity = 0.0
    batch = max(1.0, found["running"])
    totals = Counters(
        prompt_tokens=found["prompt_tokens"],
        prompt_seconds=found["prompt_seconds"],
        decode_steps=found["gaps"],
        decode_seconds=found["gap_seconds"],
        decode_sequences=found["gaps"],
        decode_resident=0.0,
        busy_seconds=0.0,
    )
    return Page(totals, batch, min(1.0, found["usage"]) * capacity / batch)


def _label(text: str, name: str) -> dict[str, str]:
    start = text.find(name + "{")
    if start < 0:
        return {}
    inside = text[start + len(name) + 1 : text.find("}", start)]
    pairs = (pair.partition("=") for pair in inside.split(","))
    return {key.strip(): value.strip().strip('"') for key, _, value in pairs}
