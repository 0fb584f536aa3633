"""A worker that the law asks for and no node takes, ever: told and undone once, and what serves goes on serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from e2e.on_kubernetes.conftest import KubernetesSite
from e2e.on_kubernetes.deployed import GPUS, NAMESPACE, Deployed
from e2e.on_kubernetes.ruled import SPEC, condition, remember, ruled_site, served
from e2e.on_kubernetes.scene import model
from forebay_operator import kube as k
from forebay_operator.homes import PENDING_LEAST_SECONDS

NAME: Final = "crowded"
START: Final = (1, 1)
"""Each takes a whole node, and there are two."""

PREFILL_HEAVY: Final = {"rate": 3.1, "fresh": 1500, "tokens": 8}
"""0.93 prefill workers: one bears it, and the law wants two (0.93 / 0.8, less a tolerance of a tenth)."""

LOOK_SECONDS: Final = 300.0
"""Windows fill in a minute and growth waits for another: 117 s were seen, on a busy machine."""

TOLD_SECONDS: Final = 120.0
HELD_SECONDS: Final = 90.0
"""After it was undone; it may be asked for again after 15 minutes."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in ruled_site(deployed, NAME):
        yield made


def _model(mode: str) -> dict[str, Any]:
    bounds = {"prefill": {"minReplicas": 1, "maxReplicas": 2}, "decode": {"minReplicas": 1, "maxReplicas": 1}}
    made = model(*START, gpus=GPUS, **SPEC, scaling={"mode": mode, **bounds})
    for pool in bounds:
        del made["spec"][pool]["replicas"]
    return made


async def test_a_pod_that_is_pending_for_ever(deployed: Deployed, site: KubernetesSite) -> None:
    scene = await served(deployed, site, _model("Off"), START)
    await site.start_traffic(streams=60, **PREFILL_HEAVY)
    await remember(site, START)
    await site.apply(_model("Auto"))

    async def pending() -> bool:
        pods = await site.pods(pool="prefill")
        return any(pod["status"].get("phase") == "Pending" for pod in pods)

    async def undone() -> bool:
        found = await condition(site, "ScalingLimited")
        told = (found.get("status"), found.get("reason")) == ("True", "NoRoom")
        return told and len(await site.pods()) == sum(START)

    asked = await site.until("the law asks for another prefill worker", pending, LOOK_SECONDS)
    told = await site.until("it is undone and told", undone, PENDING_LEAST_SECONDS + TOLD_SECONDS)
    message = (await condition(site, "ScalingLimited"))["message"]
    ends = asyncio.get_running_loop().time() + HELD_SECONDS
    while asyncio.get_running_loop().time() < ends:
        assert len(await site.pods()) == sum(START), "it is not asked for again so soon"
        await asyncio.sleep(1)
    assert await site.at(*START)
    streams = await scene.settled_traffic()
    events = await site.kube.list(k.EVENTS, NAMESPACE)
    about = [event for event in events if event.get("reason") == "WorkerUndone" and event["regarding"]["name"] == NAME]
    print(f"\nasked for after {asked:.0f} s, undone after {told:.0f} s: {message}; {streams['count']} streams, "
          f"begun late {streams['late']}")  # fmt: skip
    assert "2 workers were asked for and 1 found a node within" in message
    assert [event.get("series", {}).get("count", 1) for event in about] == [1]
    assert (streams["lost"], streams["wrong"], streams["cut"]) == (0, 0, 0), streams
