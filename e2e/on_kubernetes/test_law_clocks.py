"""Clocks five minutes apart on a cluster: the law goes on, in both directions of time, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Final

import pytest

from e2e.on_kubernetes import clocks
from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import Deployed
from e2e.on_kubernetes.ruled import (
    DECODE_HEAVY,
    LONG_ANSWERS,
    PREFILL_HEAVY,
    START,
    Turning,
    condition,
    rule,
    ruled_site,
    served,
    watched,
)
from forebay_operator.decide import reasons

NAME: Final = "adrift"
AHEAD_SECONDS: Final = 300
TURN_SECONDS: Final = 180.0
"""A new leader's windows fill in a minute; to wait for the clock would take five."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in ruled_site(deployed, NAME):
        yield made


async def test_the_operators_clock_is_five_minutes_ahead_and_then_is_not(
    deployed: Deployed, site: KubernetesSite
) -> None:
    if clocks.LACKS:
        pytest.skip(clocks.LACKS)
    await served(deployed, site)

    async def judged_at(clock: float) -> None:
        """The law has looked with this clock, past its first minute, and moved nothing."""
        had = ratios[-1]

        async def judged() -> bool:
            said = (await site.model())["status"]["decision"]
            off = datetime.fromisoformat(said["time"]).timestamp() - time.time() - clock
            return abs(off) < TURN_SECONDS and said["reason"] not in (reasons.WARMING_UP, reasons.METRICS_MISSING)

        await site.until(f"a decision by a clock {clock:.0f} s ahead", judged, TURN_SECONDS)
        assert (await condition(site, "MetricsAvailable")).get("status") == "True"
        assert ratios[-1] == had, "another clock is no reason to move"

    with watched(deployed, NAME) as ratios:
        traffic = Turning(site, ratios)
        await traffic.to(**DECODE_HEAVY)
        await rule(site, TURN_SECONDS)
        async with clocks.ahead(deployed, AHEAD_SECONDS):
            await judged_at(AHEAD_SECONDS)
            assert ratios == [f"{START[0]}:{START[1]}"]
            await traffic.to(**PREFILL_HEAVY)
            turned = await traffic.until("more prefill workers for long prompts", lambda n: n >= 2, TURN_SECONDS)
        await judged_at(0)
        most = traffic.most_prefill
        await traffic.to(**LONG_ANSWERS)
        back = await traffic.until("fewer for long answers", lambda n: n < most, TURN_SECONDS)
        seen = list(ratios)
    streams = await traffic.end()
    print(f"\nturned after {turned:.0f} s with the clock ahead, and after {back:.0f} s with it right; "
          f"kubectl get dm -w: {' -> '.join(seen)}; {streams} streams")  # fmt: skip
    traffic.assert_unharmed()
