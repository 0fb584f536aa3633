"""The same Observation from a Prometheus that scraped the same pages; and whatever else it may answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from forebay_engine.core.handle import CoreStats
from forebay_engine.server.metrics import ServerMetrics
from forebay_operator.observe import prometheus
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.prometheus import Asked, Credentials, PrometheusSource
from forebay_operator.observe.prometheus_samples import CACHE, Sample, reported_workers
from forebay_operator.observe.traffic import Health, Observation, Signal
from forebay_router import metrics as router_metrics
from forebay_router.metrics import RouterMetrics
from forebay_wire import metrics as names
from support.fake_prometheus import FakePrometheus

FLEET = Fleet((Member("assistant-prefill-1", "prefill"), Member("assistant-decode-1", "decode")), ("10.0.0.1:8000",))
STATS = CoreStats(running=3, decoding=2, resident_decode_tokens=700, queued_prefill_tokens=90, total_blocks=100,
                  free_blocks=75)  # fmt: skip


class Life:
    """A source, the Prometheus it asks, and what that has scraped; time goes on as the test says."""

    def __init__(self, url: str, fake: FakePrometheus) -> None:
        self.fake = fake
        self.now = 1_800_000_000.0
        self.elapsed = 0.0
        self.counted = RouterMetrics(1.0, 0.04)
        self.stats = STATS
        self.credentials = Credentials()
        self.source = PrometheusSource(
            Asked(url, "llm", "assistant"), lambda: self.now, credentials=self._read, monotonic=lambda: self.elapsed
        )

    async def _read(self) -> Credentials:
        return self.credentials

    def scrape(self) -> None:
        engine = ServerMetrics(lambda: self.stats).render()
        self.fake.scrape(
            assistant_router_1=router_metrics.text(router_metrics.exporter(self.counted)),
            assistant_prefill_1=engine,
            assistant_decode_1=engine,
        )

    def serve(self, requests: int = 15) -> None:
        for _ in range(requests):
            self.counted.offer(100)
            self.counted.finished(0.0, "/v1/completions", 200, 0.5, 0.02)
            self.counted.generated_tokens += 10

    async def look(self, seconds: float = 15.0, *, scrape: bool = True) -> Observation:
        self.now += seconds
        self.elapsed += seconds
        self.fake.clock += seconds
        if scrape:
            self.scrape()
        return await self.source.observe(FLEET)


@pytest.fixture
async def life() -> Any:
    fake = FakePrometheus()
    async with fake.serving() as url:
        made = Life(url, fake)
        yield made
        await made.source.close()


def _labelled(metric: str = names.ROUTER_REQUESTS, **labels: Any) -> str:
    """An answer of one sample."""
    sample = {"metric": {"__name__": metric, "pod": "assistant-router-1", **labels}, "value": [1, "1"]}
    return json.dumps({"data": {"result": [sample]}})


def signal(observation: Observation, name: str) -> Signal:
    return next(s for s in observation.signals if s.name == name)


async def test_counters_become_arrivals(life: Life) -> None:
    life.serve(1)
    await life.look()
    life.serve(15)
    life.counted.finished(0.0, "/v1/completions", 429, None, None)
    seen = await life.look()
    assert (sum(a.requests for a in seen.arrivals), len(seen.arrivals)) == (15, 15)
    assert sum(a.prompt_tokens for a in seen.arrivals) == 1500
    assert (seen.finished, seen.refused, seen.generated_tokens) == (15, 1, 150)
    assert (seen.missed_ttft or 0) + (seen.missed_tpot or 0) == 1
    decode = seen.workers[1]
    assert (decode.name, decode.role, decode.decoding, decode.resident_tokens) == (
        "assistant-decode-1",
        "decode",
        2,
        700,
    )
    assert (decode.capacity_tokens, decode.free_tokens, seen.workers[0].queued_prefill_tokens) == (1600, 1200, 90)
    assert not [s for s in seen.signals if s.needed and s.health not in (Health.FRESH, Health.ZERO)]


async def test_parts_of_misses_are_told_apart(life: Life) -> None:
    await life.look()
    life.counted.missed_in["transfer"] += 3
    life.counted.missed_in["failed"] += 1
    assert (await life.look()).missed_in == MissedIn(transfer=3, failed=1)


@pytest.mark.parametrize("parts", [{}, {"of a newer router": 4}])
async def test_parts_of_misses_that_no_router_tells(life: Life, parts: dict[str, int]) -> None:
    """Missing is unknown. A part that is not known is left out."""
    life.counted.missed_in = parts
    await life.look()
    life.serve()
    seen = await life.look()
    assert (seen.finished, seen.missed_in) == (15, MissedIn() if parts else None)


async def test_nothing_is_new_before_the_next_scrape(life: Life) -> None:
    await life.look()
    life.serve(15)
    seen = await life.look()
    again = await life.look(6.0, scrape=False)
    assert again is seen
    assert (await life.look(1.0)) is seen, "it is asked each 5 s at most"


async def test_clocks_five_minutes_apart(life: Life) -> None:
    life.fake.clock = life.now + 300
    await life.look()
    life.serve()
    seen = await life.look()
    assert seen.taken_at == life.now
    assert all(life.now - 15 <= a.at <= life.now for a in seen.arrivals)
    assert signal(seen, "worker assistant-decode-1 load").age_seconds == 0.0


async def test_speed_is_learnt(life: Life) -> None:
    await life.look()
    life.stats = CoreStats(prompt_step_tokens=5000, prompt_step_seconds=1.0, decode_steps=100, decode_busy_seconds=2.0,
                           decode_step_sequences=400, decode_step_resident=40_000, total_blocks=100)  # fmt: skip
    await life.look()
    learnt = life.source.workers()
    assert learnt is not None
    assert learnt.prefill_velocity == 5000


@pytest.mark.parametrize(
    ("spoil", "health", "said"),
    [
        ("<html>login</html>", Health.INVALID, "JSON"),
        (500, Health.INVALID, "500"),
        (401, Health.INVALID, "401"),
        ('{"status": "success"}', Health.INVALID, "KeyError"),
        ('{"data": {"result": 7}}', Health.INVALID, "no vector"),
        ('{"data": {"result": [{"metric": {"pod": "p"}, "value": [1, "NaN"]}]}}', Health.INVALID, "nan"),
        ('{"data": {"result": [{"metric": {"pod": "p"}, "value": [1, "-3"]}]}}', Health.INVALID, "-3"),
        ('{"data": {"result": [{"metric": {}, "value": [1, "3"]}]}}', Health.INVALID, "label `pod`"),
        (_labelled(pod=7), Health.INVALID, "no sample"),
        (_labelled(code="\u00b2"), Health.INVALID, "code '\u00b2'"),
        (_labelled("vllm:cache_config_info", block_size="0"), Health.INVALID, "block_size '0'"),
        (_labelled("vllm:cache_config_info", block_size="2000000"), Health.INVALID, "block_size '2000000'"),
        (_labelled("vllm:cache_config_info", num_gpu_blocks="9" * 20), Health.INVALID, "num_gpu_blocks '9{20}'"),
        (_labelled("vllm:cache_config_info", num_gpu_blocks="9" * 400), Health.INVALID, "num_gpu_blocks '9{32}'"),
        (_labelled("vllm:cache_config_info", num_gpu_blocks="\u00b2"), Health.INVALID, "num_gpu_blocks '\u00b2'"),
        ('{"data": {"result": []}}', Health.STALE, "let it scrape the PodMonitor"),
        (30.0, Health.STALE, "no answer within 0.2 s"),
    ],
)
async def test_what_it_may_answer_instead(
    life: Life, spoil: Any, health: Health, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late for 75 s, then named; and gone with the first good answer."""
    monkeypatch.setattr(prometheus, "DEADLINE_SECONDS", 0.2 if isinstance(spoil, float) else 5.0)
    life.serve()
    good = await life.look()
    life.fake.spoil = spoil
    late = await life.look()
    assert late.taken_at == good.taken_at
    assert not signal(late, "router assistant-router-1").needed
    bad = await life.look(80.0)
    trouble = signal(bad, "router assistant-router-1")
    assert (trouble.health, trouble.needed) == (health, True)
    assert re.search(said, trouble.note), trouble.note
    life.fake.spoil = None
    # The query that hung is the next look's too, should it end a moment later than the wait for it.
    assert life.source._query_running is not None
    await asyncio.wait({life.source._query_running})
    monkeypatch.setattr(prometheus, "DEADLINE_SECONDS", 5.0)
    life.serve(30)
    back = await life.look()
    assert sum(a.requests for a in back.arrivals) > 0
    assert not [s for s in back.signals if s.needed and s.health not in (Health.FRESH, Health.ZERO)]


@pytest.mark.parametrize(
    ("blocks", "waiting", "prompt", "known"),
    [
        ("100", 3.0, 200.0, (100, 800, 600)),
        ("None", 3.0, 200.0, (0, 0, 600)),
        (str(10**15), 1e15, 1e6, (10**15, 10**15, 10**15)),
    ],
)
def test_what_is_made_of_vllms_figures_is_in_range(
    blocks: str, waiting: float, prompt: float, known: tuple[int, int, int]
) -> None:
    """Products of figures that are in range each."""
    found: list[Sample] = [
        ({"__name__": "vllm:num_requests_running"}, 1.0),
        ({"__name__": "vllm:num_requests_waiting"}, waiting),
        ({"__name__": "vllm:kv_cache_usage_perc"}, 0.5),
        ({"__name__": CACHE, "num_gpu_blocks": blocks, "block_size": "16"}, 1.0),
    ]
    (worker, _) = reported_workers({"assistant-prefill-1": found}, {}, FLEET, 16, prompt)
    load = worker.load
    assert load is not None
    assert (load.total_blocks, load.resident_decode_tokens, load.queued_prefill_tokens) == known


async def test_nobody_is_led_elsewhere_or_shown_what_answered(life: Life) -> None:
    """Who may write a model chooses the address; the operator's network, and its memory, are not theirs."""
    await life.look()
    other = FakePrometheus()
    async with other.serving() as url:
        life.fake.spoil = {"Location": f"{url}/api/v1/query"}
        led = signal(await life.look(80.0), "router assistant-router-1")
        assert not other.seen
    assert (led.health, "302" in led.note) == (Health.INVALID, True)
    life.fake.spoil = 500
    refused = signal(await life.look(), "router assistant-router-1")
    assert "500" in refused.note
    assert "upstream failed" not in refused.note


async def test_an_answer_without_end(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    await life.look()
    monkeypatch.setattr(life.source._session, "_max_bytes", 10_000)
    life.fake.spoil = "x" * 50_000
    long = signal(await life.look(80.0), "router assistant-router-1")
    assert "more than 10000 bytes" in long.note
    life.fake.spoil = None
    life.serve()
    back = await life.look()
    assert not [s for s in back.signals if s.needed and s.health not in (Health.FRESH, Health.ZERO)]


async def test_without_the_series_from_the_start(life: Life) -> None:
    await life.look(scrape=False)
    early = await life.look(40.0, scrape=False)
    assert not [s for s in early.signals if s.needed and s.health == Health.MISSING], "it may not have scraped yet"
    seen = await life.look(40.0, scrape=False)
    assert seen.finished is None
    assert [s.health for s in seen.signals if s.needed] == [Health.MISSING]


async def test_an_address_that_is_wrong_is_told_of_soon(life: Life) -> None:
    life.fake.spoil = 404
    assert not [s for s in (await life.look()).signals if s.needed]
    (told,) = [s for s in (await life.look(20.0)).signals if s.needed]
    assert (told.health, "404" in told.note) == (Health.INVALID, True)


async def test_one_workers_samples_stand_still(life: Life) -> None:
    await life.look()
    await life.look()
    held = life.fake.pages["assistant-decode-1"]
    for _ in range(6):
        life.now, life.elapsed, life.fake.clock = life.now + 15, life.elapsed + 15, life.fake.clock + 15
        life.scrape()
        life.fake.pages["assistant-decode-1"] = held
        seen = await life.source.observe(FLEET)
    frozen = signal(seen, "worker assistant-decode-1 load")
    assert (frozen.health, frozen.needed, frozen.age_seconds) == (Health.STALE, True, 90.0)
    assert signal(await life.look(), "worker assistant-decode-1 load").health == Health.FRESH


async def test_it_scrapes_no_more(life: Life) -> None:
    """Prometheus answers at once, with what it knew when its targets went."""
    await life.look()
    good = await life.look()
    for _ in range(6):
        seen = await life.look(scrape=False)
    trouble = signal(seen, "router assistant-router-1")
    assert (trouble.health, trouble.needed, seen.taken_at) == (Health.STALE, True, good.taken_at)
    assert "its last sample is 90 s old" in trouble.note
    back = await life.look()
    assert not [s for s in back.signals if s.needed and s.health not in (Health.FRESH, Health.ZERO)]


async def test_a_token_is_sent_and_a_new_one_too(life: Life) -> None:
    await life.look()
    assert "Authorization" not in life.fake.seen[-1]
    for token in ("first", "second"):
        life.credentials = Credentials(token)
        await life.look()
        assert life.fake.seen[-1]["Authorization"] == f"Bearer {token}"


async def test_headers_are_sent_beside_the_token(life: Life) -> None:
    """A Prometheus of several tenants answers nobody who does not name one."""
    source = PrometheusSource(
        Asked(life.source._asked.url, "llm", "assistant", headers={"X-Scope-OrgID": "team a"}),
        lambda: life.now,
        credentials=life._read,
    )
    life.credentials = Credentials("t")
    await source.observe(FLEET)
    await source.close()
    assert len(life.fake.seen) == 4
    for seen in life.fake.seen:
        assert (seen["X-Scope-OrgID"], seen["Authorization"]) == ("team a", "Bearer t")


async def test_certificates_are_verified(life: Life) -> None:
    assert life.source._session.verify is True
    life.credentials = Credentials("t", b"-----BEGIN CERTIFICATE-----\n")
    await life.look()
    file = life.source._session.verify
    assert isinstance(file, str)
    with open(file, "rb") as held:
        assert held.read() == b"-----BEGIN CERTIFICATE-----\n"
    life.credentials = Credentials("t")
    await life.look()
    assert life.source._session.verify is True
