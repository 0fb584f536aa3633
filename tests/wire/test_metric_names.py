"""Names of metrics are promises to dashboards and to the rescaling law: each is exported, by whom its name says."""

from __future__ import annotations

import pytest

from forebay_engine.core.handle import CoreStats
from forebay_engine.server.metrics import ServerMetrics
from forebay_router import metrics
from forebay_router.metrics import RouterMetrics
from forebay_wire import metrics as names

NAMES = sorted(value for name, value in vars(names).items() if name.startswith(("ROUTER_", "ENGINE_")))

PROMISED = """
    forebay_router_requests_total forebay_router_time_to_first_token_seconds
    forebay_router_time_per_output_token_seconds forebay_router_inter_token_latency_seconds
    forebay_router_offered_prompt_tokens_total forebay_router_cached_prompt_tokens_total
    forebay_router_generated_tokens_total forebay_router_requests_in_objective_total
    forebay_router_ttft_part_seconds forebay_router_degraded_total forebay_router_retries_total
    forebay_engine_transfer_bytes_total forebay_engine_transfer_seconds_total forebay_engine_transfer_failures_total
    forebay_engine_leases_expired_total forebay_engine_held_blocks forebay_engine_kv_usage_ratio
"""


@pytest.fixture(scope="module")
def exported() -> set[str]:
    texts = metrics.text(metrics.exporter(RouterMetrics(1.0, 0.04))), ServerMetrics(CoreStats).render()
    lines = b"\n".join(texts).decode().splitlines()
    return {line.split()[2] for line in lines if line.startswith("# TYPE ")}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_exported(exported: set[str], name: str) -> None:
    assert name in exported


@pytest.mark.parametrize("name", PROMISED.split())
def test_dashboards_find_what_they_know(exported: set[str], name: str) -> None:
    assert name in exported
