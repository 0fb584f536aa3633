"""Clocks five minutes apart on a cluster: the law goes on, in both directions of time, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Final

import pytest

from e2e.on_kubernetes import clocks
from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import Deployed
from e2e.on_kubernetes.ruled import (
    DECODE_HEAVY,
    LONG_ANSWERS,
    PREFILL_HEAVY,
    START,
    condition,
    prefill_of,
    rule,
    ruled_site,
    served,
    watched,
)

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
    ended: list[dict[str, Any]] = []
    took: dict[str, float] = {}

    async def turn(**traffic: Any) -> None:
        ended.append(await site.stop_traffic())
        await site.start_traffic(streams=60, **traffic)

    async def measured(status: str) -> bool:
        return (await condition(site, "MetricsAvailable")).get("status") == status

    with watched(deployed, NAME) as ratios:
        await turn(**DECODE_HEAVY)
        await rule(site, TURN_SECONDS)
        async with clocks.ahead(deployed, AHEAD_SECONDS):
            assert set(ratios) == {f"{START[0]}:{START[1]}"}, "another clock is no reason to move"

            async def more_prefill() -> bool:
                return prefill_of(ratios[-1]) >= 2

            await turn(**PREFILL_HEAVY)
            took["ahead"] = await site.until("more prefill workers for long prompts", more_prefill, TURN_SECONDS)
            decided = datetime.fromisoformat((await site.model())["status"]["decision"]["time"]).timestamp()
            assert decided > time.time() + AHEAD_SECONDS - TURN_SECONDS, "the operator's clock was not moved"
            assert await measured("True")
        most = max(map(prefill_of, ratios))
        assert prefill_of(ratios[-1]) == most, "nor is the right one"

        async def fewer_prefill() -> bool:
            return prefill_of(ratios[-1]) < most

        await turn(**LONG_ANSWERS)
        took["back"] = await site.until("fewer for long answers", fewer_prefill, TURN_SECONDS)
        assert await measured("True")
        seen = list(ratios)
    ended.append(await site.stop_traffic())
    streams = sum(each["count"] for each in ended if each)
    print(f"\nturned after {took['ahead']:.0f} s with the clock ahead, and after {took['back']:.0f} s with it right; "
          f"kubectl get dm -w: {' -> '.join(seen)}; {streams} streams")  # fmt: skip
    for each in ended:
        assert not each or (each["lost"], each["wrong"], each["cut"]) == (0, 0, 0), each
