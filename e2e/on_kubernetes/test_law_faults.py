"""What goes wrong around the rescaling law on a cluster: a condition names it, the ratio stays, streams go on, and it
clears by itself once it is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from e2e.cluster import two_nodes
from e2e.on_kubernetes.conftest import KubernetesSite, needs_own_nodes
from e2e.on_kubernetes.deployed import NAMESPACE, Deployed
from e2e.on_kubernetes.disruptions import kill_operators
from e2e.on_kubernetes.ruled import DECODE_HEAVY, SPEC, START, condition, rule, ruled_site, served, watched
from e2e.on_kubernetes.scene import model
from forebay_operator import kube as k

NAME: Final = "faulted"
TOLD_SECONDS: Final = 90.0
"""The suite's autoscalers write each 5 s, usual ones each 15 s; two writes are told of."""

CLEAR_SECONDS: Final = 120.0
NOWHERE: Final = "http://prometheus.nowhere.svc:9090"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in ruled_site(deployed, NAME):
        yield made


async def _told(site: KubernetesSite, kind: str, status: str, words: str = "", seconds: float = TOLD_SECONDS) -> float:
    async def told() -> bool:
        found = await condition(site, kind)
        return found.get("status") == status and words in found["message"]

    return await site.until(f"{kind} {status} with {words!r}", told, seconds)


async def test_faults_around_the_law_move_nothing_and_clear(deployed: Deployed, site: KubernetesSite) -> None:
    needs_own_nodes(deployed, "stops a worker's processes")
    scene = await served(deployed, site)
    await site.start_traffic(streams=60, **DECODE_HEAVY)
    await rule(site, CLEAR_SECONDS)
    seconds: dict[str, tuple[float, float]] = {}
    with watched(deployed, NAME) as ratios:
        prometheus = {"mode": "Auto", "metrics": {"source": "Prometheus", "url": NOWHERE}}
        await site.apply(model(*START, **SPEC, scaling=prometheus))
        told = await _told(site, "MetricsAvailable", "False", "prometheus.nowhere")
        await site.apply(model(*START, **SPEC, scaling={"mode": "Auto"}))
        seconds["Prometheus away"] = told, await _told(site, "MetricsAvailable", "True", seconds=CLEAR_SECONDS)

        pod = (await site.pods(role="decode"))[0]
        with _stopped(pod["metadata"]["uid"]):
            told = await _told(site, "PoolsAvailable", "False")
        seconds["a worker stands still"] = told, await scene.serves(*START, seconds=CLEAR_SECONDS)

        (deployment,) = [
            each["metadata"]["name"]
            for each in await site.kube.list(k.DEPLOYMENTS, NAMESPACE, selector=f"forebay.dev/model={NAME}")
            if "-decode-" in each["metadata"]["name"]
        ]
        autoscaler = ("-n", NAMESPACE, "autoscale", "deployment", deployment, f"--name={NAME}", "--min=5", "--max=6")
        await asyncio.to_thread(deployed.kubectl, *autoscaler, "--cpu-percent=80")
        try:
            told = await _told(site, "ForeignWriter", "True", deployment, CLEAR_SECONDS)
        finally:
            await asyncio.to_thread(deployed.kubectl, "-n", NAMESPACE, "delete", "hpa", NAME, "--ignore-not-found")
        # By itself the count comes back when the truce ends, after ten minutes or more; a new leader knows of none.
        await kill_operators(scene)
        cleared = await _told(site, "ForeignWriter", "False", seconds=CLEAR_SECONDS)
        seconds["an autoscaler on a child"] = told, cleared + await scene.serves(*START, seconds=CLEAR_SECONDS)
        seen = list(ratios)
    streams = await scene.settled_traffic()
    for name, (told, cleared) in seconds.items():
        print(f"\n{name}: told after {told:.0f} s, well {cleared:.0f} s after its end", end="")
    print(f"\nkubectl get dm -w: {' -> '.join(seen)}; {streams['count']} streams, begun late {streams['late']}")
    assert (streams["lost"], streams["wrong"], streams["cut"]) == (0, 0, 0), streams
    moves = [d for d in (await site.model())["status"].get("decisions", []) if d.get("from") != d.get("to")]
    assert moves == [], "no fault is a reason to change the ratio"


@contextmanager
def _stopped(uid: str) -> Iterator[None]:
    assert two_nodes.signal_containers(uid, signal.SIGSTOP)
    try:
        yield
    finally:
        two_nodes.signal_containers(uid, signal.SIGCONT)
