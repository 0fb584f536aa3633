"""Everything that moves workers or takes parts away, under steady traffic: no stream lost, truncated or wrong.

One model and one traffic for the whole file; each test leaves four serving workers, and the next begins where it ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.cluster import components, two_nodes
from e2e.cluster.state import state
from e2e.on_kubernetes.conftest import KubernetesSite, site_of
from e2e.on_kubernetes.deployed import NAMESPACE, OPERATOR_NAMESPACE, Deployed
from forebay_operator import kube as k
from forebay_operator.api import labels

STREAMS = 20
SETTLE_SECONDS = 120.0
NAME = "assistant"
API_AWAY_SECONDS = 60.0

pytestmark = pytest.mark.timeout(400)


def model(prefill: int, decode: int, **engine: Any) -> dict[str, Any]:
    worker = {"name": "engine", "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    router = {"name": "router", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
    small = {"podTemplate": {"spec": {"containers": [worker]}}}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {},
        "spec": {
            "model": {"servedName": NAME},
            "engine": {
                "type": "Simulated",
                "kvCache": {"memory": "1Gi"},
                "simulated": {"performanceModel": "slow"},
                **engine,
            },
            "prefill": {"replicas": prefill, **small},
            "decode": {"replicas": decode, **small},
            "router": {"replicas": 2, "podTemplate": {"spec": {"containers": [router]}}},
            # The test says where the ratio goes.
            "scaling": {"mode": "Off"},
            "drain": {"timeoutSeconds": 60},
        },
    }


class Watch:
    """What the traffic came to while a test ran."""

    def __init__(self, site: KubernetesSite, before: dict[str, Any]) -> None:
        self._site = site
        self._before = before

    async def flowing(self, more: int) -> None:
        """Until so many more streams ended."""
        goal = (await self._site.traffic())["count"] + more

        async def reached() -> bool:
            return bool((await self._site.traffic())["count"] >= goal)

        await self._site.until(f"{more} more streams ended", reached, 90)

    async def harm(self) -> dict[str, Any]:
        """New since the test began. Every stream that was open is given the time to end."""
        await self.flowing(STREAMS + 5)
        now = await self._site.traffic()
        return {
            "wrong": now["wrong"][self._before["wrongs"] :],
            "broken": now["broken"] - self._before["broken"],
            "refused": now["refused"] - self._before["refused"],
        }

    async def unharmed(self) -> None:
        assert await self.harm() == {"wrong": [], "broken": 0, "refused": 0}


def _needs_own_nodes(deployed: Deployed, what: str) -> None:
    if not deployed.cluster.built_here:
        pytest.skip(f"{what}: needs the two nodes built here, not a cluster that is {deployed.cluster.provider}")


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in site_of(deployed, NAME):
        yield made


@pytest.fixture
async def watch(site: KubernetesSite) -> Watch:
    """The model serves with one prefill and three decode workers, and traffic flows."""
    await site.apply(model(1, 3))
    await site.until("four workers serve", lambda: site.at(1, 3), SETTLE_SECONDS)
    state = await site.traffic()
    if state is None:
        # Ready routers are reached through the Service once kube-proxy has them too.
        answer = await site.ask({"model": NAME, "prompt": "ready?", "max_tokens": 1}, patience=30)
        assert answer["status"] == 200, f"the Service does not answer: {answer}"
        await site.start_traffic(streams=STREAMS)
        state = await site.traffic()
    return Watch(site, state)


async def test_roles_switch_both_ways(site: KubernetesSite, watch: Watch) -> None:
    for prefill, decode in ((2, 2), (1, 3)):
        await site.set_targets(prefill, decode)
        took = await site.until(f"roles {prefill}:{decode}", lambda p=prefill, d=decode: site.at(p, d))  # type: ignore[misc]
        print(f"\nroles {prefill}:{decode} after {took:.1f} s")
        await watch.flowing(5)
    await watch.unharmed()


async def test_scale_in_and_out(site: KubernetesSite, watch: Watch) -> None:
    for decode in (1, 3):
        await site.apply(model(1, decode))
        took = await site.until(f"1:{decode}", lambda d=decode: site.at(1, d), SETTLE_SECONDS)  # type: ignore[misc]
        print(f"\n1:{decode} after {took:.1f} s")
    await watch.unharmed()


async def test_a_rollout_and_its_rollback(site: KubernetesSite, watch: Watch) -> None:
    """One worker at a time, none added: the cluster is taken for full."""
    before = {pod["metadata"]["uid"] for pod in await site.pods()}
    await site.apply(model(1, 3, env=[{"name": "REVISION", "value": "2"}]))

    async def both() -> bool:
        return len({pod["metadata"]["labels"][labels.REVISION] for pod in await site.pods()}) > 2

    await site.until("some of each revision", both, SETTLE_SECONDS)
    # Back before it ends: what is left of the old ones stays.
    await site.apply(model(1, 3))
    took = await site.until("rolled back", lambda: site.at(1, 3), 2 * SETTLE_SECONDS)
    kept = before & {pod["metadata"]["uid"] for pod in await site.pods()}
    print(f"\nrolled back after {took:.1f} s; {len(kept)} of 4 workers were never replaced")
    assert 0 < len(kept) < 4
    await watch.unharmed()


async def test_a_node_is_drained(deployed: Deployed, site: KubernetesSite, watch: Watch) -> None:
    node = deployed.nodes[1]
    assert any(pod["spec"]["nodeName"] == node for pod in await site.pods())
    words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=200s")
    try:
        await asyncio.to_thread(lambda: deployed.kubectl(*words, seconds=220))
        there = [pod for pod in [*await site.pods(), *await site.routers()] if pod["spec"].get("nodeName") == node]
        assert there == []
        await site.until("four workers serve on the other node", lambda: site.at(1, 3), SETTLE_SECONDS)
    finally:
        deployed.kubectl("uncordon", node)
    await watch.unharmed()


async def test_the_operator_is_killed_while_a_worker_leaves(
    deployed: Deployed, site: KubernetesSite, watch: Watch
) -> None:
    _needs_own_nodes(deployed, "kills containers' processes")
    await site.apply(model(1, 2))

    async def leaving() -> bool:
        return any(labels.DRAINING in pod["metadata"]["labels"] for pod in await site.pods())

    await site.until("a worker fenced", leaving)
    operators = await site.kube.list(k.PODS, OPERATOR_NAMESPACE, selector="app.kubernetes.io/name=forebay-operator")
    for pod in operators:
        assert two_nodes.kill_containers(pod["metadata"]["uid"])
    took = await site.until("1:2", lambda: site.at(1, 2), SETTLE_SECONDS)
    print(f"\n1:2 {took:.1f} s after both operators were killed")
    await watch.unharmed()


async def test_a_router_is_killed(deployed: Deployed, site: KubernetesSite, watch: Watch) -> None:
    """Only what it relayed is lost. A connection that is refused was never a request: the client tries again."""
    _needs_own_nodes(deployed, "kills a container's process")
    open_before = (await site.traffic())["open"]
    pod = (await site.routers())[0]
    before = pod["status"]["containerStatuses"][0]["restartCount"]
    assert two_nodes.kill_containers(pod["metadata"]["uid"])

    async def again() -> bool:
        now = await site.kube.get(k.PODS, NAMESPACE, pod["metadata"]["name"])
        status = now["status"]["containerStatuses"][0]
        return bool(status["restartCount"] > before and status["ready"])

    await site.until("the router's container runs anew", again)
    harm = await watch.harm()
    print(f"\nof {open_before} open streams {harm['broken']} broke; {harm['refused']} connections were tried again")
    assert harm["wrong"] == []
    # The Service sends about half of the streams to each router.
    assert 0 < harm["broken"] <= open_before * 0.9


async def test_the_api_server_is_away_for_a_minute(deployed: Deployed, site: KubernetesSite, watch: Watch) -> None:
    _needs_own_nodes(deployed, "stops the API server's process")
    before = (await site.traffic())["count"]
    two_nodes.signal_process(state(), "host", components.API_SERVER, signal.SIGSTOP)
    try:
        # As where they elect leaders: without an API server they lose their leases, and end.
        for name in components.FOLLOWERS:
            two_nodes.stop_follower(state(), name)
        # The time away is the case, not a wait for something.
        await asyncio.sleep(API_AWAY_SECONDS)
    finally:
        two_nodes.signal_process(state(), "host", components.API_SERVER, signal.SIGCONT)
        for name in components.FOLLOWERS:
            two_nodes.start_follower(state(), name)

    async def answers() -> bool:
        return bool(await site.kube.list(k.NODES, None))

    await site.until("the API server answers", answers)
    during = (await site.traffic())["count"] - before
    print(f"\n{during} streams ended while the API server was away")
    assert during > 2 * STREAMS
    await site.until("four workers serve", lambda: site.at(1, 3), SETTLE_SECONDS)
    await watch.unharmed()


async def test_the_whole_run(deployed: Deployed, site: KubernetesSite) -> None:
    """Last: what all of it came to, and the model is deleted under traffic's end."""
    final = await site.stop_traffic()
    print(f"\n{final['count']} streams in all; wrong {final['wrongs']}, broken by the router's end {final['broken']}")
    assert final["wrong"] == []
    assert final["open"] == 0
    await asyncio.to_thread(lambda: deployed.kubectl("-n", NAMESPACE, "delete", "dm", NAME, seconds=120))
