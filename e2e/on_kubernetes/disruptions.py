"""Everything that moves workers or takes parts away. Each begins and ends with the model serving as it was applied."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

from e2e.cluster import components, two_nodes
from e2e.cluster.state import state
from e2e.on_kubernetes.deployed import NAMESPACE, OPERATOR_NAMESPACE, RELEASE
from e2e.on_kubernetes.scene import SETTLE_SECONDS, Scene, model
from forebay_operator import kube as k
from forebay_operator.api import labels

API_AWAY_SECONDS: Final = 60.0
DRAIN_SECONDS: Final = 200
_NEEDED_HERE: Final = "app notin (client),k8s-app notin (kube-dns)"
"""The client itself, and the one pod of cluster DNS that the suite's nodes have, are not what is tried."""


async def switch_roles(scene: Scene) -> None:
    """A worker of 1:3 to the other role, and back."""
    for prefill, decode in ((2, 2), (1, 3)):
        await scene.site.set_targets(prefill, decode)
        await scene.serves(prefill, decode)
        await scene.flowing(5)


async def scale_in_and_out(scene: Scene, most: int) -> None:
    """The decode pool to one worker, and back."""
    for decode in (1, most):
        await scene.serve(1, decode)


async def roll_back(scene: Scene, prefill: int, decode: int, *, gpus: int, revision: int) -> tuple[int, int]:
    """A new revision and, before all workers have it, back again. Workers that stayed, and all."""
    before = await _staying(scene)
    await scene.site.apply(model(prefill, decode, gpus=gpus, revision=revision + 1))

    async def both() -> bool:
        pods = [pod for pod in await scene.site.pods() if not pod["metadata"].get("deletionTimestamp")]
        held = {(pod["metadata"]["labels"][labels.REVISION], pod["metadata"]["uid"] in before) for pod in pods}
        return {old for _, old in held} == {True, False}

    await scene.site.until("some of each revision", both, SETTLE_SECONDS)
    # What is left of the old ones stays.
    await scene.site.apply(model(prefill, decode, gpus=gpus, revision=revision))
    await scene.serves(prefill, decode, 2 * SETTLE_SECONDS)
    pods = await _staying(scene)
    return len(before & pods), len(pods)


async def _staying(scene: Scene) -> set[str]:
    """Workers by uid, without those that are drained and on their way out: they count as none."""
    pods = await scene.site.pods()
    return {pod["metadata"]["uid"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}


async def roll_out(scene: Scene, prefill: int, decode: int, *, gpus: int, revision: int) -> None:
    """`revision`, for every worker."""
    before = {pod["metadata"]["uid"] for pod in await scene.site.pods()}
    await scene.site.apply(model(prefill, decode, gpus=gpus, revision=revision))

    async def all_new() -> bool:
        pods = {pod["metadata"]["uid"] for pod in await scene.site.pods()}
        return not pods & before and await scene.site.at(prefill, decode)

    await scene.site.until(f"all at revision {revision}", all_new, 3 * SETTLE_SECONDS)


async def drain(scene: Scene, node: str, prefill: int, decode: int) -> None:
    """`kubectl drain` of a node, and `uncordon`."""
    kubectl = scene.deployed.kubectl
    # Others' pods on a lent cluster stay where they are.
    chosen = labels.MODEL if scene.deployed.cluster.lent else _NEEDED_HERE
    words = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={DRAIN_SECONDS}s")
    try:
        await asyncio.to_thread(lambda: kubectl(*words, f"--pod-selector={chosen}", seconds=DRAIN_SECONDS + 20.0))
        there = [pod for pod in [*await scene.site.pods(), *await scene.site.routers()] if _on(pod, node)]
        assert there == []
        await scene.serves(prefill, decode)
    finally:
        await asyncio.to_thread(kubectl, "uncordon", node)


def _on(pod: dict[str, Any], node: str) -> bool:
    return bool(pod["spec"].get("nodeName") == node)


async def busiest_node(scene: Scene) -> str:
    """Where most of the workers are."""
    nodes = [pod["spec"].get("nodeName") for pod in await scene.site.pods()]
    return max(scene.deployed.nodes, key=nodes.count)


async def delete_pod_on_loan(scene: Scene) -> None:
    """At 2:2 of homes 1:3, the decode pool's worker that serves prefill: its replacement takes the loan over."""
    await scene.site.set_targets(2, 2)
    await scene.serves(2, 2)
    await _delete(scene, await _on_loan(scene))
    await scene.serves(2, 2)
    await scene.site.set_targets(1, 3)
    await scene.serves(1, 3)


async def delete_pod_on_loan_without_operator(scene: Scene) -> None:
    """The same while no operator runs: it is replaced all the same, and has its role once one is there again."""
    await scene.site.set_targets(2, 2)
    await scene.serves(2, 2)
    loan = await _on_loan(scene)
    async with _no_operator(scene):
        await _delete(scene, loan)

        async def replaced() -> bool:
            pods = [pod for pod in await scene.site.pods() if not pod["metadata"].get("deletionTimestamp")]
            return len(pods) == 4 and all(_ready(pod) for pod in pods)

        await scene.site.until("its replacement is ready", replaced, SETTLE_SECONDS)
        await scene.flowing(20)
    await scene.serves(2, 2)
    await scene.site.set_targets(1, 3)
    await scene.serves(1, 3)


async def _on_loan(scene: Scene) -> dict[str, Any]:
    found = await scene.site.pods(pool="decode", role="prefill")
    assert len(found) == 1, found
    return found[0]


async def _delete(scene: Scene, pod: dict[str, Any]) -> None:
    """As `kubectl delete pod` does, to its end."""
    words = ("-n", NAMESPACE, "delete", "pod", pod["metadata"]["name"], "--timeout=120s")
    await asyncio.to_thread(lambda: scene.deployed.kubectl(*words, seconds=130.0))


def _ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@contextlib.asynccontextmanager
async def _no_operator(scene: Scene) -> AsyncIterator[None]:
    kubectl = scene.deployed.kubectl
    there = len(await scene.operators())

    async def gone() -> bool:
        return not await scene.operators()

    try:
        await asyncio.to_thread(kubectl, "-n", OPERATOR_NAMESPACE, "scale", "deployment", RELEASE, "--replicas=0")
        await scene.site.until("no operator runs", gone)
        yield
    finally:
        words = ("-n", OPERATOR_NAMESPACE, "scale", "deployment", RELEASE, f"--replicas={there}")
        await asyncio.to_thread(kubectl, *words)


async def kill_operators(scene: Scene) -> None:
    """SIGKILL to every operator."""
    await asyncio.gather(*(_kill(scene, pod) for pod in await scene.operators()))


async def kill_router(scene: Scene) -> None:
    """SIGKILL to one router."""
    pod, *others = await scene.site.routers()
    await _kill(scene, pod)

    async def again() -> bool:
        routers = await scene.site.routers()
        uids = {each["metadata"]["uid"] for each in routers if _ready(each)}
        return len(uids) == 1 + len(others) and pod["metadata"]["uid"] not in uids

    await scene.site.until("another router is ready", again)


async def _kill(scene: Scene, pod: dict[str, Any]) -> None:
    """SIGKILL to its processes. It is replaced too: containers that start anew in one pod wait longer each time."""
    meta = pod["metadata"]
    await asyncio.to_thread(two_nodes.signal_containers, meta["uid"], signal.SIGKILL)
    # The deletion alone would let it end in order.
    words = (
        "-n",
        meta["namespace"],
        "delete",
        "pod",
        meta["name"],
        "--grace-period=0",
        "--force",
        "--ignore-not-found",
    )
    await asyncio.to_thread(scene.deployed.kubectl, *words, "--wait=false")


async def stop_api_server(scene: Scene) -> int:
    """For a minute, the controllers ending meanwhile. Streams that ended in it."""
    before = (await scene.site.traffic())["count"]
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
        return bool(await scene.site.kube.list(k.NODES, None))

    await scene.site.until("the API server answers", answers)
    return int((await scene.site.traffic())["count"] - before)
