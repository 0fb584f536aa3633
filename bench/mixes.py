"""The traffic of bench.rescale: public traces alone and chained into mixes, at rates set for the performance model.

A folder of traces holds azure2023/, mooncake/ and servegen/ as docs/rescaling.md lists them; they are no part of the
repository. A file that is not there is replaced by made-up traffic of the same means, and the report says so.
"""

from __future__ import annotations

import random
from functools import cache, lru_cache
from pathlib import Path

from forebay_operator.replay.chain import Segment, chain
from forebay_operator.replay.trace import Arrival, Trace, read

FILES = {
    "azure-code": ("azure2023/AzureLLMInferenceTrace_code.csv", "azure", 2048, 28),
    "azure-conv": ("azure2023/AzureLLMInferenceTrace_conv.csv", "azure", 1155, 211),
    "mooncake": ("mooncake/conversation_trace.jsonl", "mooncake", 12035, 343),
    "servegen-r1": ("servegen/generated_deepseek-r1_1h_peak10rps_seed0.csv", "servegen", 2135, 1118),
}
"""File, format, and the mean prompt and output tokens that stand in for a file that is not there."""

RATES = {"heavy": (60.0, 18.0, 14.0), "light": (48.0, 14.0, 11.0)}
"""Requests/s of conv, code and R1: about 80 % and 64 % of what the best split of each regime carries on this model."""

ALONE_SECONDS = 2400.0
CONV, CODE, R1 = "azure-conv", "azure-code", "servegen-r1"
PARTS: dict[str, list[tuple[str, float]]] = {
    "mix": [(CONV, 600), (CODE, 600), (R1, 600), (CONV, 600)],
    "tight": [(CONV, 600), (CODE, 600), (R1, 600), (CONV, 600)],
    "long": [(CONV, 1200), (R1, 1800)] * 2,
    "alternating": [(CONV, 150), (R1, 150)] * 8,
    "steady": [(CONV, 2400)],
}
"""Trace and seconds of each part."""

_folder: Path | None = None


def use(folder: Path | None) -> None:
    """Read traces from `folder` from now on."""
    global _folder
    _folder = folder
    for made in (source, alone, mixed):
        made.cache_clear()


def missing(folder: Path | None) -> list[str]:
    """Traces that `folder` does not hold."""
    return [name for name, (path, *_) in FILES.items() if folder is None or not (folder / path).is_file()]


def made_up(name: str, seed: int = 7) -> Trace:
    """An hour of Poisson arrivals with lognormal lengths of the trace's means."""
    _, _, prompt, output = FILES[name]
    rng = random.Random(seed)
    at, trace = 0.0, []
    while (at := at + rng.expovariate(5.0)) < 3600:
        sizes = [max(1, round(mean * rng.lognormvariate(-0.5, 1.0))) for mean in (prompt, output)]
        trace.append(Arrival(at, min(sizes[0], 100_000), min(sizes[1], 20_000)))
    return trace


@cache
def source(name: str) -> Trace:
    path, format_name, _, _ = FILES[name]
    if _folder is None or not (_folder / path).is_file():
        return made_up(name)
    return read(_folder / path, format_name)


@lru_cache(maxsize=1)
def alone(name: str, rate: float, seed: int, scale: float = 1.0) -> Trace:
    """One trace at `rate` requests/s for 40 minutes; `scale` multiplies the length."""
    return chain([Segment(source(name), rate=rate, seconds=ALONE_SECONDS * scale)], seed)


@lru_cache(maxsize=2)
def mixed(mix: str, level: str, seed: int, scale: float = 1.0) -> Trace:
    """One of PARTS at the rates of `level`; `scale` multiplies the parts' length."""
    rates = dict(zip((CONV, CODE, R1), RATES[level], strict=True))
    segments, at = [], 0.0
    for name, seconds in PARTS[mix]:
        segments.append(Segment(source(name), at, rates[name], seconds * scale))
        at += seconds * scale
    return chain(segments, seed)
