"""/metrics: the core's totals read at scrape time, and the server's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from forebay_engine.core.handle import CoreStats, TransferTotals
from forebay_wire import metrics as names

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 8.0, 16.0, 32.0)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_GAUGES: tuple[tuple[str, str, Callable[[CoreStats], float]], ...] = (
    (names.ENGINE_RUNNING, "Requests in the running batch", lambda s: s.running),
    (names.ENGINE_WAITING, "Requests waiting to be scheduled", lambda s: s.waiting),
    (
        names.ENGINE_KV_USAGE,
        "Share of KV blocks in use, 0 to 1",
        lambda s: 1 - s.free_blocks / s.total_blocks if s.total_blocks else 0.0,
    ),
    (names.ENGINE_RESIDENT_TOKENS, "Context tokens of decoding requests", lambda s: s.resident_decode_tokens),
    (names.ENGINE_WAITING_PULLS, "Requests waiting for another worker's KV", lambda s: s.waiting_pulls),
    (names.ENGINE_DECODING, "Requests that the last step made a token for", lambda s: s.decoding),
    (names.ENGINE_QUEUED_PREFILL, "Prompt tokens not computed yet", lambda s: s.queued_prefill_tokens),
    (names.ENGINE_KV_BLOCKS, "KV blocks there are", lambda s: s.total_blocks),
    (names.ENGINE_HELD_BLOCKS, "KV blocks leased out, waiting to be pulled", lambda s: s.held_blocks),
    (names.ENGINE_DOUBTFUL_BLOCKS, "KV blocks set aside: a read may still land there", lambda s: s.doubtful_blocks),
)
_COUNTERS: tuple[tuple[str, str, Callable[[CoreStats], float]], ...] = (
    (names.ENGINE_PREFILL_TOKENS, "Prompt tokens computed", lambda s: s.prefill_tokens),
    (names.ENGINE_PREFILL_BUSY, "Seconds spent in prefill steps", lambda s: s.prefill_busy_seconds),
    (names.ENGINE_PROMPT_STEP_TOKENS, "Tokens of steps with prompts only", lambda s: s.prompt_step_tokens),
    (names.ENGINE_PROMPT_STEP_SECONDS, "Seconds of steps with prompts only", lambda s: s.prompt_step_seconds),
    (names.ENGINE_CACHED_TOKENS, "Prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    (names.ENGINE_DECODE_STEPS, "Decode steps", lambda s: s.decode_steps),
    (names.ENGINE_DECODE_TOKENS, "Tokens generated", lambda s: s.decode_tokens),
    (names.ENGINE_DECODE_BUSY, "Seconds spent in decode steps", lambda s: s.decode_busy_seconds),
    (names.ENGINE_DECODE_STEP_SEQUENCES, "Sum of batches over decode steps", lambda s: s.decode_step_sequences),
    (names.ENGINE_DECODE_STEP_RESIDENT, "Sum of context tokens over decode steps", lambda s: s.decode_step_resident),
    (names.ENGINE_PREEMPTIONS, "Requests preempted for want of blocks", lambda s: s.preemptions),
    (names.ENGINE_RECOMPUTED, "Prompts recomputed since their KV could not be had", lambda s: s.recomputed),
    (names.ENGINE_LEASES_EXPIRED, "Leases that ran out before they were pulled", lambda s: s.leases_expired),
)

_TRANSFER_COUNTERS: tuple[tuple[str, str, Callable[[TransferTotals], float]], ...] = (
    (names.ENGINE_TRANSFER_BYTES, "KV bytes pulled from other workers", lambda t: t.bytes),
    (names.ENGINE_TRANSFER_SECONDS, "Seconds spent pulling KV", lambda t: t.seconds),
    (names.ENGINE_TRANSFER_FAILURES, "Pulls that failed", lambda t: t.failures),
)


class _CoreCollector(Collector):
    def __init__(self, stats: Callable[[], CoreStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(name, text, value=read(stats))
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(name, text, value=read(stats))
        # By the transport of the time: a switch starts another series and moves none.
        by_transport = stats.transfers or {stats.transport: TransferTotals()}
        for name, text, total in _TRANSFER_COUNTERS:
            family = CounterMetricFamily(name, text, labels=["transport"])
            for transport, totals in by_transport.items():
                family.add_metric([transport], total(totals))
            yield family


class ServerMetrics:
    def __init__(self, stats: Callable[[], CoreStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_CoreCollector(stats))
        self._requests = Counter(
            names.ENGINE_HTTP_REQUESTS, "Requests by role and code", ["role", "code"], registry=self._registry
        )
        self._ttft = Histogram(
            names.ENGINE_TTFT,
            "From a request's head to its first token here",
            ["role"],
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._seconds = Histogram(
            names.ENGINE_REQUEST_SECONDS,
            "From a request's head to its last byte",
            ["role"],
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )

    def first_token(self, role: str, seconds: float) -> None:
        self._ttft.labels(role).observe(seconds)

    def request(self, role: str, code: int, seconds: float) -> None:
        self._requests.labels(role, str(code)).inc()
        self._seconds.labels(role).observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)


METRICS: web.AppKey[ServerMetrics] = web.AppKey("metrics", ServerMetrics)


async def scrape(request: web.Request) -> web.Response:
    """GET /metrics."""
    return web.Response(body=request.app[METRICS].render(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
