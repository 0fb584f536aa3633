"""Pages of our engine and of vLLM, and what is no such page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.core.handle import CoreStats
from forebay_engine.server.metrics import ServerMetrics
from forebay_operator.observe.worker_counters import BadMetrics, parse_page

STATS = CoreStats(
    prefill_busy_seconds=3.0,
    prompt_step_tokens=9000,
    prompt_step_seconds=2.0,
    decode_steps=100,
    decode_busy_seconds=2.5,
    decode_step_sequences=800,
    decode_step_resident=160_000,
)
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 8.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} %(prompt)s
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 9.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} %(prefill)s
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} %(gap_seconds)s
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} %(gaps)s
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="1000"} 1.0
"""


def page(stats: CoreStats) -> bytes:
    return ServerMetrics(lambda: stats).render()


def vllm(prompt: float, prefill: float, gap_seconds: float, gaps: float) -> bytes:
    return (VLLM % {"prompt": prompt, "prefill": prefill, "gap_seconds": gap_seconds, "gaps": gaps}).encode()


def test_our_engines_own_page() -> None:
    """Rendered by the engine itself: a renamed metric fails here."""
    totals = parse_page(page(STATS)).totals
    assert (totals.prompt_tokens, totals.prompt_seconds) == (9000, 2.0)
    assert (totals.decode_steps, totals.decode_seconds) == (100, 2.5)
    assert (totals.decode_sequences, totals.decode_resident) == (800, 160_000)
    assert totals.busy_seconds == 5.5


def test_vllm_counts_tokens_not_steps() -> None:
    """800 gaps of 20 ms in batches of 8 are 100 steps of 20 ms; a quarter of 16,000 tokens is resident, 500 each."""
    gone = parse_page(vllm(3000, 1.5, 26.0, 1300)).since(parse_page(vllm(1000, 0.5, 10.0, 500)))
    assert gone is not None
    assert (gone.prompt_tokens, gone.prompt_seconds) == (2000, 1.0)
    assert (gone.decode_steps, gone.decode_seconds) == (100, 2.0)
    assert (gone.decode_sequences, gone.decode_resident) == (800, 400_000)


@pytest.mark.parametrize("blocks", ["nan", "inf", "1e309", "-4", "1e15"])
def test_a_cache_of_no_sane_size_is_not_known(blocks: str) -> None:
    """A label is any text."""
    spoilt = [
        parse_page(vllm(1000, 0.5, seconds, gaps).replace(b'"1000"', f'"{blocks}"'.encode()))
        for seconds, gaps in ((10.0, 500), (26.0, 1300))
    ]
    gone = spoilt[1].since(spoilt[0])
    assert gone is not None
    assert (gone.decode_steps, gone.decode_resident) == (100, 0)


def test_a_restart_has_no_increment() -> None:
    assert parse_page(page(CoreStats())).since(parse_page(page(STATS))) is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is not there"),
        (b"<html><body>502 Bad Gateway</body></html>", "is not there"),
        (page(STATS).replace(b"forebay_engine_decode_busy_seconds_total", b"forebay_engine_other"), "decode_busy"),
        (page(STATS).replace(b"_prompt_step_tokens_total 9000.0", b"_prompt_step_tokens_total NaN"), "NaN"),
        (page(STATS).replace(b"_prompt_step_tokens_total 9000.0", b"_prompt_step_tokens_total -1"), "-1"),
        (page(STATS).replace(b"_prompt_step_tokens_total 9000.0", b"_prompt_step_tokens_total 1e300"), "1e300"),
        (page(STATS).replace(b"_prompt_step_tokens_total 9000.0", b"_prompt_step_tokens_total many"), "many"),
    ],
)
def test_what_is_no_page_is_said(body: bytes, said: str) -> None:
    with pytest.raises(BadMetrics, match=said):
        parse_page(body)


@given(st.binary(max_size=200), st.integers(0, 4000), st.integers(0, 200))
def test_no_bytes_make_it_fail_otherwise(junk: bytes, at: int, cut: int) -> None:
    whole = page(STATS)
    spoilt = whole[:at] + junk + whole[at + cut :]
    try:
        totals = parse_page(spoilt).totals
    except BadMetrics:
        return
    assert all(0 <= value <= 7e15 for value in totals)
