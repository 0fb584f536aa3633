"""Pods that have ended (evicted, refused by a kubelet) stay as objects: they are no workers any more."""

from __future__ import annotations

from support.fake_cluster import native_model
from support.fake_cluster import simulated_model as model
from support.reconcile_bench import Bench


async def evicted(bench: Bench, pool: str) -> str:
    name = str(bench.cluster.workers(pool)[0]["metadata"]["name"])
    bench.cluster.evict(name)
    await bench.rest()
    return name


async def test_scale_in_after_an_eviction_drains_the_worker_that_goes(bench: Bench) -> None:
    """A ReplicaSet does not count it: taken for the victim, it would cost a serving worker that nobody drained."""
    bench.put(model(1, 3))
    await bench.rest()
    gone = await evicted(bench, "decode")
    assert bench.cluster.roles() == {"prefill": 1, "decode": 4}, "the ended one keeps its label"
    bench.cluster.deleted.clear()
    for pod in bench.cluster.workers("decode"):
        bench.cluster.running[pod["metadata"]["name"]] = 2
    bench.put(model(1, 2))
    for _ in range(20):
        await bench.once()
    assert not bench.cluster.deleted, "requests run on all of them, and the drain has time"
    bench.cluster.running.clear()
    await bench.rest()
    ((victim, left),) = bench.cluster.deleted
    assert left == 0
    assert victim["metadata"]["name"] != gone
    assert victim["metadata"]["labels"]["forebay.dev/draining"] == "true"
    assert "operation" not in bench.live()


async def test_an_ended_pod_is_counted_nowhere(bench: Bench) -> None:
    bench.put(native_model(1, 2, scaling={"maxGPUs": 3}))
    await bench.rest()
    await evicted(bench, "decode")
    status = bench.live()
    assert (status["replicas"], status["decode"]["replicas"], status["decode"]["serving"]) == (3, 2, 2)
    # With its GPU counted there would be none for the other pool's worker.
    bench.put(native_model(2, 1, scaling={"maxGPUs": 3}))
    await bench.rest()
    assert bench.deployment("prefill")["spec"]["replicas"] == 2
    assert bench.deployment("decode")["spec"]["replicas"] == 1
    assert "operation" not in bench.live()
