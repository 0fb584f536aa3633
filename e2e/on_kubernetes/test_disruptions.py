"""Everything that moves workers or takes parts away, under steady traffic: no stream lost, truncated or wrong.

One model and one traffic for the whole file; each test leaves four serving workers, and the next begins where it ended.
test_repeats.py does the same again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from e2e.on_kubernetes import disruptions, network
from e2e.on_kubernetes.conftest import KubernetesSite, needs_own_nodes, site_of
from e2e.on_kubernetes.connections import Connection
from e2e.on_kubernetes.deployed import CLIENT, GPUS, NAMESPACE, Deployed
from e2e.on_kubernetes.scene import NAME, SETTLE_SECONDS, STREAMS, UNHARMED, Scene, harm, model
from forebay_operator import kube as k
from forebay_operator.api import labels
from forebay_operator.build import ports

pytestmark = pytest.mark.timeout(400)


class Watch:
    """What the traffic came to while a test ran."""

    def __init__(self, scene: Scene, before: dict[str, Any]) -> None:
        self.scene = scene
        self.before = before

    async def harm(self) -> dict[str, Any]:
        """New since the test began. Every stream that was open is given the time to end."""
        return harm(self.before, await self.scene.settled_traffic())

    async def unharmed(self) -> None:
        assert await self.harm() == UNHARMED


@pytest.fixture
async def site(deployed: Deployed) -> AsyncIterator[KubernetesSite]:
    async for made in site_of(deployed, NAME):
        yield made


@pytest.fixture
async def watch(deployed: Deployed, site: KubernetesSite) -> Watch:
    """The model serves with one prefill and three decode workers, and traffic flows."""
    scene = Scene(deployed, site)
    await scene.serve(1, 3)
    if await site.traffic() is None:
        await scene.begin_traffic()
    return Watch(scene, await site.traffic())


async def test_roles_switch_both_ways(watch: Watch) -> None:
    await disruptions.switch_roles(watch.scene)
    await watch.unharmed()


async def test_scale_in_and_out(watch: Watch) -> None:
    await disruptions.scale_in_and_out(watch.scene, 3)
    await watch.unharmed()


async def test_a_rollout_and_its_rollback(watch: Watch) -> None:
    """One worker at a time, none added: the cluster is taken for full."""
    kept, workers = await disruptions.roll_back(watch.scene, 1, 3, gpus=0, revision=0)
    print(f"\n{kept} of {workers} workers were never replaced")
    assert 0 < kept < workers == 4
    await watch.unharmed()


async def test_a_pod_on_loan_is_deleted(watch: Watch) -> None:
    await disruptions.delete_pod_on_loan(watch.scene)
    await watch.unharmed()


async def test_a_pod_on_loan_is_deleted_while_no_operator_runs(watch: Watch) -> None:
    await disruptions.delete_pod_on_loan_without_operator(watch.scene)
    await watch.unharmed()


async def test_connections_are_those_that_the_policies_allow(
    deployed: Deployed, site: KubernetesSite, watch: Watch
) -> None:
    """Looked for in the pods until each of the product's ways was seen in use."""
    judge = await network.judge(deployed)
    workers = {pod["status"]["podIP"]: "worker" for pod in await site.pods()}
    routers = {pod["status"]["podIP"]: "router" for pod in await site.routers()}
    operators = {pod["status"]["podIP"]: "operator" for pod in await watch.scene.operators()}
    client = await site.kube.get(k.PODS, NAMESPACE, CLIENT)
    who = {**workers, **routers, **operators, client["status"]["podIP"]: "client"}
    found: set[Connection] = set()
    wanted = {("client", "router"), ("router", "worker"), ("worker", "worker"), ("operator", "router")}

    def ways() -> set[tuple[str, str]]:
        return {(who.get(each.source, "?"), who.get(each.target, "?")) for each in found}

    async def all_seen() -> bool:
        found.update(await network.seen(deployed, site))
        return wanted <= ways()

    await site.until(f"connections {wanted}", all_seen)
    print(f"\n{len(found)} connections by {sorted(ways())}")
    assert {each for each in found if not judge.allowed(each)} == set()
    # The judge can refuse.
    worker, stranger = next(iter(workers)), client["status"]["podIP"]
    assert not judge.allowed(Connection(stranger, worker, ports.HTTP))
    assert not judge.allowed(Connection(worker, stranger, 9000))
    assert not judge.allowed(Connection(next(iter(routers)), next(iter(operators)), ports.HTTP))


async def test_a_node_is_drained(deployed: Deployed, site: KubernetesSite, watch: Watch) -> None:
    node = await disruptions.busiest_node(watch.scene)
    assert any(pod["spec"]["nodeName"] == node for pod in await site.pods())
    await disruptions.drain(watch.scene, node, 1, 3)
    await watch.unharmed()


async def test_the_operator_is_killed_while_a_worker_leaves(
    deployed: Deployed, site: KubernetesSite, watch: Watch
) -> None:
    needs_own_nodes(deployed, "kills containers' processes")
    await site.apply(model(1, 2))

    async def leaving() -> bool:
        return any(labels.DRAINING in pod["metadata"]["labels"] for pod in await site.pods())

    await site.until("a worker fenced", leaving)
    await disruptions.kill_operators(watch.scene)
    took = await watch.scene.serves(1, 2, SETTLE_SECONDS)
    print(f"\n1:2 {took:.1f} s after both operators were killed")
    await watch.unharmed()


async def test_a_router_is_killed(deployed: Deployed, watch: Watch) -> None:
    """Only what it relayed is lost. A connection that is refused was never a request: the client tries again."""
    needs_own_nodes(deployed, "kills a container's process")
    await disruptions.kill_router(watch.scene)
    harmed = await watch.harm()
    print(f"\nof {watch.before['open']} open streams {harmed['cut']} were cut; "
          f"{harmed['refused']} connections were tried again")  # fmt: skip
    assert (harmed["lost"], harmed["wrong"]) == (0, 0), harmed["told"]
    # The Service sends about half of the streams to each router.
    assert 0 < harmed["cut"] <= watch.before["open"] * 0.9


async def test_the_api_server_is_away_for_a_minute(deployed: Deployed, watch: Watch) -> None:
    needs_own_nodes(deployed, "stops the API server's process")
    during = await disruptions.stop_api_server(watch.scene)
    print(f"\n{during} streams ended while the API server was away")
    assert during > 2 * STREAMS
    await watch.scene.serves(1, 3)
    await watch.unharmed()


async def test_a_rollout_and_its_rollback_of_a_pair_that_takes_all_gpus(watch: Watch) -> None:
    """The last one that changes workers: the pair is far slower than the four before it."""
    await watch.scene.serve(1, 1, gpus=GPUS)
    kept, workers = await disruptions.roll_back(watch.scene, 1, 1, gpus=GPUS, revision=0)
    assert (kept, workers) == (1, 2)
    await watch.unharmed()


async def test_the_whole_run(deployed: Deployed, site: KubernetesSite) -> None:
    """Last: what all of it came to, and the model is deleted under traffic's end."""
    final = await site.stop_traffic()
    print(f"\n{final['count']} streams in all; lost {final['lost']}, wrong {final['wrong']}, cut by a router's end "
          f"{final['cut']}, begun late {final['late']}")  # fmt: skip
    assert (final["lost"], final["wrong"], final["open"]) == (0, 0, 0), final["told"]
    await asyncio.to_thread(lambda: deployed.kubectl("-n", NAMESPACE, "delete", "dm", NAME, seconds=120))
