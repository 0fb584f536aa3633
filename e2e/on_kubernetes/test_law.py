"""The rescaling law on a cluster: traffic turns round and back, and the ratio of `kubectl get dm -w` follows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import Deployed
from e2e.on_kubernetes.ruled import (
    DECODE_HEAVY,
    LONG_ANSWERS,
    PREFILL_HEAVY,
    START,
    prefill_of,
    rule,
    ruled_site,
    served,
    watched,
)

NAME = "turning"
TURN_SECONDS = 60.0

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in ruled_site(deployed, NAME):
        yield made


async def test_the_ratio_follows_traffic(deployed: Deployed, site: KubernetesSite) -> None:
    await served(deployed, site)
    ended: list[dict[str, Any]] = []

    async def turn(**traffic: Any) -> None:
        ended.append(await site.stop_traffic())
        await site.start_traffic(streams=60, **traffic)

    with watched(deployed, NAME) as ratios:
        await turn(**DECODE_HEAVY)
        took = [await rule(site, TURN_SECONDS)]
        assert ratios == [f"{START[0]}:{START[1]}"]

        async def more_prefill() -> bool:
            return prefill_of(ratios[-1]) >= 2

        await turn(**PREFILL_HEAVY)
        took.append(await site.until("more prefill workers for long prompts", more_prefill, TURN_SECONDS))

        async def fewer_prefill() -> bool:
            return prefill_of(ratios[-1]) < max(map(prefill_of, ratios))

        await turn(**LONG_ANSWERS)
        took.append(await site.until("fewer for long answers", fewer_prefill, TURN_SECONDS))
        seen = list(ratios)
    ended.append(await site.stop_traffic())
    streams = sum(each["count"] for each in ended if each)
    print(f"\nkubectl get dm -w: {' -> '.join(seen)}; first judged, turned and back after "
          f"{', '.join(f'{each:.0f}' for each in took)} s; {streams} streams")  # fmt: skip
    for each in ended:
        assert not each or (each["lost"], each["wrong"], each["cut"]) == (0, 0, 0), each
