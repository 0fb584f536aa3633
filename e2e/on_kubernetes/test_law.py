"""The rescaling law on a cluster: traffic turns round and back, and the ratio of `kubectl get dm -w` follows."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import Deployed
from e2e.on_kubernetes.ruled import (
    DECODE_HEAVY,
    LONG_ANSWERS,
    PREFILL_HEAVY,
    START,
    Turning,
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
    with watched(deployed, NAME) as ratios:
        traffic = Turning(site, ratios)
        await traffic.to(**DECODE_HEAVY)
        took = [await rule(site, TURN_SECONDS)]
        assert ratios == [f"{START[0]}:{START[1]}"]
        await traffic.to(**PREFILL_HEAVY)
        took.append(await traffic.until("more prefill workers for long prompts", lambda n: n >= 2, TURN_SECONDS))
        await traffic.to(**LONG_ANSWERS)
        fewer = "fewer for long answers"
        took.append(await traffic.until(fewer, lambda n: n < traffic.most_prefill, TURN_SECONDS))
        seen = list(ratios)
    streams = await traffic.end()
    print(f"\nkubectl get dm -w: {' -> '.join(seen)}; first judged, turned and back after "
          f"{', '.join(f'{each:.0f}' for each in took)} s; {streams} streams")  # fmt: skip
    traffic.assert_unharmed()
