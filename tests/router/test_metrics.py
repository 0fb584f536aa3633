"""Design section 6's definitions, and histograms that attainment can be read off."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from forebay_router import metrics
from forebay_router.account import Account
from forebay_router.legs import ClientCall
from forebay_router.metrics import Histogram, RouterMetrics
from forebay_wire import metrics as names
from forebay_wire import paths


@pytest.mark.parametrize(
    ("code", "ttft", "tpot", "attainment"),
    [
        (200, 0.9, 0.03, 1.0),
        (200, 1.1, 0.03, 0.0),
        (200, 0.9, 0.05, 0.0),
        (200, 0.9, None, 1.0),  # one token: TPOT is met
        (429, None, None, 0.0),
        (503, None, None, 0.0),
        (504, 0.1, None, 0.0),
        (400, None, None, None),
        (404, None, None, None),
        (499, 0.1, None, None),
    ],
)
def test_attainment(code: int, ttft: float | None, tpot: float | None, attainment: float | None) -> None:
    counted = RouterMetrics(1.0, 0.04)
    counted.finished(0.0, "/v1/completions", code, ttft, tpot)
    assert counted.window(1.0)["attainment"] == attainment


def test_totals_tell_what_was_missed() -> None:
    """TTFT first: what missed both counts once, and what was refused never had a first token."""
    counted = RouterMetrics(1.0, 0.04)
    for code, ttft, tpot in (
        (200, 0.9, 0.03),
        (200, 1.1, 0.05),
        (200, 0.9, 0.05),
        (429, None, None),
        (503, None, None),
        (499, 0.1, None),
        (404, None, None),
    ):
        counted.offer(10)
        counted.finished(0.0, "p", code, ttft, tpot)
    totals = counted.as_json(1.0)["totals"]
    assert (totals["offered_requests"], totals["offered_prompt_tokens"]) == (7, 70)
    assert (totals["in_objective"], totals["missed_ttft"], totals["missed_tpot"]) == (1, 3, 1)


def test_window_moves_on() -> None:
    counted = RouterMetrics(1.0, 0.04)
    for second in range(100):
        counted.finished(float(second), "p", 200, second / 100, 0.01)
    window = counted.window(100.0)
    assert window["requests"] == 60
    assert window["ttft_p95_ms"] == 960.0  # nearest rank of 0.40 .. 0.99
    empty = counted.window(1000.0)
    assert (empty["requests"], empty["ttft_p95_ms"], empty["attainment"]) == (0, None, None)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=30))
def test_offered_tokens_are_the_prompts_own_in_the_end(requests: list[tuple[int, int]]) -> None:
    """Estimates count at arrival. Their errors are made up for, by the next requests where they were too high."""
    counted = RouterMetrics(1.0, 0.04)
    seen = [0]
    for estimated, tokens in requests:
        counted.offer(estimated)
        seen.append(counted.offered_prompt_tokens)
        counted.prompt_known(estimated, tokens, tokens // 2)
        seen.append(counted.offered_prompt_tokens)
    assert seen == sorted(seen), "a counter never falls"
    total = sum(tokens for _, tokens in requests)
    assert counted.offered_prompt_tokens >= total
    counted.offer(20_000)
    assert counted.offered_prompt_tokens == total + 20_000
    assert counted.cached_prompt_tokens == sum(tokens // 2 for _, tokens in requests)


def test_edges_bracket_the_objective() -> None:
    counted = RouterMetrics(2.0, 0.04)
    assert counted.ttft.edges == (1.0, 1.6, 2.0, 2.5, 4.0)
    assert counted.itl.edges == pytest.approx((0.02, 0.032, 0.04, 0.05, 0.08))


def test_without_objectives_all_that_is_served_meets_them() -> None:
    counted = RouterMetrics(math.inf, math.inf)
    for code, ttft, tpot in ((200, 900.0, 60.0), (200, 0.1, None), (429, None, None), (503, None, None)):
        counted.finished(0.0, "p", code, ttft, tpot)
    told = json.loads(json.dumps(counted.as_json(1.0), allow_nan=False))
    assert (told["ttft_objective_ms"], told["tpot_objective_ms"], told["attainment"]) == (None, None, 0.5)
    assert (told["totals"]["in_objective"], told["totals"]["missed_ttft"], told["totals"]["missed_tpot"]) == (2, 2, 0)
    assert counted.ttft.edges == (0.5, 0.8, 1.0, 1.25, 2.0), "as with the usual objective"
    text = metrics.text(metrics.exporter(counted)).decode()
    assert text.count(f"{names.ROUTER_TTFT}_bucket") == 6, "no edge twice"


def test_a_value_on_an_edge_is_within() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]
    assert histogram.sum == 7.5


def test_text_is_prometheus() -> None:
    counted = RouterMetrics(1.0, 0.04)
    counted.finished(0.0, "/v1/chat/completions", 200, 0.7, 0.02)
    counted.itl.observe(0.0, 3)
    counted.degraded["no_decode"] += 1
    counted.retries[("prefill", "reset")] += 2
    text = metrics.text(metrics.exporter(counted)).decode()
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples[("forebay_router_requests_total", ("code", "200"), ("path", "/v1/chat/completions"))] == 1
    assert samples[("forebay_router_retries_total", ("leg", "prefill"), ("reason", "reset"))] == 2
    assert samples[("forebay_router_inter_token_latency_seconds_count",)] == 3
    assert samples[("forebay_router_time_to_first_token_seconds_bucket", ("le", "0.5"))] == 0
    assert samples[("forebay_router_time_to_first_token_seconds_bucket", ("le", "0.8"))] == 1
    assert samples[("forebay_router_degraded_total", ("kind", "no_decode"))] == 1


@pytest.mark.parametrize(("complete", "code"), [(True, 200), (False, 499)])
def test_a_client_that_leaves_after_the_last_byte_has_its_answer(complete: bool, code: int) -> None:
    call = ClientCall(paths.COMPLETIONS, {}, stream=True, split=True, several=False)
    account = Account(RouterMetrics(1.0, 0.04), lambda: 1.0, call, "r", 0.0)
    account.complete, account.code = complete, 200
    account.client_left()
    assert account.code == code
