"""What the router counts: Prometheus text at /metrics, the same numbers as compact JSON at /load.

Plain dicts and lists: an observation costs under a microsecond, which matters once per token.
"""

from __future__ import annotations

import bisect
import math
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay_wire import metrics as names

WINDOW_SECONDS = 60.0
WINDOW_REQUESTS = 8192
"""At most so many requests are kept for the window's percentiles, the latest ones."""

PARTS = ("queue", "prefill", "decode_admission", "handoff")
"""Of TTFT, as the router sees them: until the (last) prefill leg was sent; that leg, the worker's own queue in it;
waiting for a decode slot beyond it; and, where the first text had to wait for the decode worker, until it came."""


UNBOUND_TTFT, UNBOUND_TPOT = 1.0, 0.1
"""Seconds that the histograms' edges are multiples of where there is no objective: the API's defaults."""


class Histogram:
    """Cumulative buckets on read, one bisect on write. Edges in seconds."""

    def __init__(self, edges: Iterable[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.edges, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total = 0
        rows: list[tuple[str, float]] = []
        for edge, count in zip((*self.edges, math.inf), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if edge == math.inf else repr(edge), total))
        return rows

    def as_json(self) -> dict[str, Any]:
        return {"edges": self.edges, "counts": self.counts, "sum": round(self.sum, 6)}


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that counts for attainment."""

    at: float
    ttft: float | None
    tpot: float | None
    met: bool


class RouterMetrics:
    """All counts of one router. Objectives in seconds; one of infinity is none, and all that is served meets it. `now`
    is passed in."""

    def __init__(self, ttft_objective: float, tpot_objective: float) -> None:
        self.instance = secrets.token_hex(4)
        """Of this process: totals of another one start anew."""

        self.ttft_objective = ttft_objective
        self.tpot_objective = tpot_objective
        edges = names.OBJECTIVE_BUCKETS
        ttft = ttft_objective if math.isfinite(ttft_objective) else UNBOUND_TTFT
        tpot = tpot_objective if math.isfinite(tpot_objective) else UNBOUND_TPOT
        self.ttft = Histogram(ttft * edge for edge in edges)
        self.tpot = Histogram(tpot * edge for edge in edges)
        self.itl = Histogram(tpot * edge for edge in edges)
        self.parts = {part: Histogram(ttft * edge for edge in edges) for part in PARTS}
        self.requests: Counter[tuple[int, str]] = Counter()
        self.degraded: Counter[str] = Counter()
        self.retries: Counter[tuple[str, str]] = Counter()
        self.converted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.offered_requests = 0
        self.offered_prompt_tokens = 0
        self._overestimated = 0
        """Offered tokens counted too much so far, and not made up for yet."""

        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.in_objective = 0
        self.missed_ttft = 0
        self.missed_tpot = 0
        """Where TTFT was held. What was refused or failed has missed TTFT."""

        self.missed_in = dict.fromkeys(names.MISSED_IN, 0)
        """The same, by what took the time (missed.py)."""

        self.in_flight = 0
        self._window: deque[Finished] = deque(maxlen=WINDOW_REQUESTS)

    def offer(self, tokens: int) -> None:
        """A request was taken, with about so many prompt tokens: demand is known at arrival."""
        self.offered_requests += 1
        self._offer_tokens(tokens)

    def _offer_tokens(self, tokens: int) -> None:
        made_up = min(tokens, self._overestimated)
        self._overestimated -= made_up
        self.offered_prompt_tokens += tokens - made_up

    def prompt_known(self, estimated: int, tokens: int, cached: int) -> None:
        """The prompt of a request has `tokens` tokens. What its estimate was too high by is left out of the requests to
        come, since a counter never falls."""
        self.cached_prompt_tokens += cached
        if tokens > estimated:
            self._offer_tokens(tokens - estimated)
        else:
            self._overestimated += estimated - tokens

    def finished(self, now: float, path: str, code: int, ttft: float | None, tpot: float | None) -> str:
        """A request ended with `code` (499: the client left). Design section 6: 429, 5xx and what missed an objective
        are missed; client aborts and other 4xx are left out; TPOT of a single token is met.

        Returns what was missed: `ttft`, `tpot` or nothing. The caller counts what took the time in `missed_in`."""
        self.requests[(code, path)] += 1
        if ttft is not None:
            self.ttft.observe(ttft)
        if tpot is not None:
            self.tpot.observe(tpot)
        if 400 <= code < 500 and code != 429:
            return ""
        late = code >= 400 or (ttft is not None and ttft > self.ttft_objective)
        slow = not late and tpot is not None and tpot > self.tpot_objective
        met = not late and not slow
        self.in_objective += met
        self.missed_ttft += late
        self.missed_tpot += slow
        self._window.append(Finished(now, ttft, tpot, met))
        return "ttft" if late else "tpot" if slow else ""

    def window(self, now: float) -> dict[str, Any]:
        """The last 60 s. None where nothing was measured: missing and zero are different things."""
        while self._window and now - self._window[0].at > WINDOW_SECONDS:
            self._window.popleft()
        ended = self._window
        return {
            "ttft_p95_ms": _milliseconds(_p95([f.ttft for f in ended if f.ttft is not None])),
            "tpot_p95_ms": _milliseconds(_p95([f.tpot for f in ended if f.tpot is not None])),
            "attainment": round(sum(f.met for f in ended) / len(ended), 4) if ended else None,
            "requests": len(ended),
        }

    def as_json(self, now: float) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "in_flight": self.in_flight,
            **self.window(now),
            "window_seconds": WINDOW_SECONDS,
            "ttft_objective_ms": _milliseconds(self.ttft_objective),
            "tpot_objective_ms": _milliseconds(self.tpot_objective),
            "totals": {
                "requests": [
                    {"code": code, "path": path, "count": count} for (code, path), count in self.requests.items()
                ],
                "in_objective": self.in_objective,
                "missed_ttft": self.missed_ttft,
                "missed_tpot": self.missed_tpot,
                "missed_in": self.missed_in,
                "offered_requests": self.offered_requests,
                "offered_prompt_tokens": self.offered_prompt_tokens,
                "cached_prompt_tokens": self.cached_prompt_tokens,
                "generated_tokens": self.generated_tokens,
                "degraded": dict(self.degraded),
                "converted": dict(self.converted),
                "refused": dict(self.refused),
                "retries": [
                    {"leg": leg, "reason": reason, "count": count} for (leg, reason), count in self.retries.items()
                ],
            },
            "histograms": {
                "ttft": self.ttft.as_json(),
                "tpot": self.tpot.as_json(),
                "itl": self.itl.as_json(),
                "ttft_parts": {part: histogram.as_json() for part, histogram in self.parts.items()},
            },
        }


def _p95(values: list[float]) -> float | None:
    """Nearest rank."""
    if not values:
        return None
    values.sort()
    return values[math.ceil(0.95 * len(values)) - 1]


def _milliseconds(seconds: float | None) -> float | None:
    """Of infinity None: JSON has none."""
    return None if seconds is None or math.isinf(seconds) else round(1000 * seconds, 3)


class _Exporter(Collector):
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        yield _counter(names.ROUTER_REQUESTS, "Requests ended, by status (499: the client left) and path.",
                       ("code", "path"), {(str(code), path): n for (code, path), n in m.requests.items()})  # fmt: skip
        yield _histogram(names.ROUTER_TTFT, "Request read to first content written.", m.ttft)
        yield _histogram(names.ROUTER_TPOT, "(last - first) / (tokens - 1) of an answer.", m.tpot)
        yield _histogram(names.ROUTER_ITL, "Gap between content chunks.", m.itl)
        yield _counter(names.ROUTER_OFFERED_REQUESTS, "Requests taken.", (), {(): m.offered_requests})
        yield _counter(names.ROUTER_OFFERED_PROMPT_TOKENS, "Prompt tokens of requests taken (estimated until known).",
                       (), {(): m.offered_prompt_tokens})  # fmt: skip
        yield _counter(names.ROUTER_CACHED_PROMPT_TOKENS, "Prompt tokens found in a prefill worker's cache.",
                       (), {(): m.cached_prompt_tokens})  # fmt: skip
        yield _counter(names.ROUTER_GENERATED_TOKENS, "Tokens of answers.", (), {(): m.generated_tokens})
        yield _counter(names.ROUTER_IN_OBJECTIVE, "Requests that met both objectives.", (), {(): m.in_objective})
        yield _counter(names.ROUTER_MISSED, "Requests that missed an objective, by what took the most time.",
                       ("part",), {(part,): n for part, n in m.missed_in.items()})  # fmt: skip
        parts = HistogramMetricFamily(names.ROUTER_TTFT_PART, "Parts of the time to first token.", labels=("part",))
        for part, histogram in m.parts.items():
            parts.add_metric((part,), histogram.buckets(), histogram.sum)
        yield parts
        yield _counter(names.ROUTER_DEGRADED, "Requests whose two phases could not run on two workers.",
                       ("kind",), {(kind,): n for kind, n in m.degraded.items()})  # fmt: skip
        yield _counter(names.ROUTER_CONVERTED, "Requests with both phases on a decode worker by choice.",
                       ("kind",), {(kind,): n for kind, n in m.converted.items()})  # fmt: skip
        yield _counter(names.ROUTER_REFUSED, "Requests refused since they would have missed their objective.",
                       ("by",), {(by,): n for by, n in m.refused.items()})  # fmt: skip
        yield _counter(names.ROUTER_RETRIES, "Legs tried again on another worker.",
                       ("leg", "reason"), dict(m.retries))  # fmt: skip
        yield GaugeMetricFamily("forebay_router_requests_in_flight", "Requests being served.", value=m.in_flight)


def _counter(name: str, text: str, labels: tuple[str, ...], values: dict[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)


def exporter(metrics: RouterMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Exporter(metrics))
    return registry


def text(registry: CollectorRegistry) -> bytes:
    """Prometheus text format 0.0.4."""
    return generate_latest(registry)
