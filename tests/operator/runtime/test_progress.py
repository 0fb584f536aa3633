"""What Flux, Helm and `kubectl wait` read while a changed spec is being brought about: never done before it is."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_cluster import simulated_model as model
from support.fake_kube import Object
from support.reconcile_bench import Bench
from support.statuses import kstatus

ENGINE: dict[str, Any] = {"type": "Simulated", "image": "engine:2", "kvCache": {"memory": "1Gi"}}


def verdict(bench: Bench) -> str:
    held = bench.api.find("disaggregatedmodels", "assistant")
    assert held is not None
    return kstatus(held["metadata"]["generation"], held.get("status", {}))


def images(bench: Bench) -> set[str]:
    """Of the workers, and whether they are ready: what a rollout has come to."""
    return {f"{p['spec']['containers'][0]['image']} {bench.cluster.is_ready(p)}" for p in bench.cluster.workers()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (model(1, 1), model(1, 1, engine=ENGINE)),
        (model(2, 3), model(2, 3, engine=ENGINE)),
        (model(1, 2), model(1, 1, engine=ENGINE)),
    ],
    ids=["one worker each", "more", "with a scale-in"],
)
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_rollout_is_not_done_before_its_end(
    bench: Bench, before: Object, after: Object, restarts: bool
) -> None:
    bench.put(before)
    await bench.rest()
    assert verdict(bench) == "Current"
    bench.put(after)
    passes = 0
    while images(bench) != {"engine:2 True"}:
        assert verdict(bench) == "InProgress", (passes, images(bench), bench.live()["conditions"][1])
        await bench.once()
        if restarts:
            bench.restart()
        passes += 1
        assert passes < 300
    await bench.rest()
    assert verdict(bench) == "Current"


async def test_a_changed_router_is_in_progress_from_the_first_pass_on(bench: Bench) -> None:
    bench.put(model(1, 1))
    await bench.rest()
    bench.put(model(1, 1, router={"replicas": 1, "image": "router:2"}))
    assert verdict(bench) == "InProgress"
    await bench.once()
    assert verdict(bench) == "InProgress", "what this pass saw was the old Deployment"
    await bench.rest()
    assert verdict(bench) == "Current"


async def test_workers_of_the_last_step_must_serve_first(bench: Bench) -> None:
    """At 1P:1D nothing else of a new revision that never gets ready would show: the other worker does both phases."""
    bench.put(model(1, 1))
    await bench.rest()
    bench.cluster.unready = True
    bench.put(model(1, 1, engine=ENGINE))
    for _ in range(60):
        await bench.once()
    assert bench.condition("Ready") == ("True", "ServingDegraded")
    assert verdict(bench) == "InProgress"
    bench.cluster.unready = False
    for pod in bench.cluster.workers():
        bench.cluster.set_ready(pod["metadata"]["name"], True)
    await bench.rest()
    assert verdict(bench) == "Current"
    assert len(bench.api.all("deployments")) == 3, "then the old revisions' Deployments are removed"


async def test_a_rollout_that_needs_a_person_has_failed(bench: Bench) -> None:
    """kstatus takes the first that is True, Reconciling or Stalled."""
    bench.put(model(1, 2))
    await bench.rest()
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    status = {"name": "engine", "image": "engine:2", "state": waiting}
    bench.cluster.broken = {"phase": "Pending", "podIP": "10.97.0.1", "containerStatuses": [status]}
    bench.put(model(1, 2, engine=ENGINE))
    for _ in range(60):
        await bench.once()
    assert bench.condition("Ready")[0] == "True"
    assert verdict(bench) == "Failed"
    bench.cluster.cure()
    await bench.rest()
    assert verdict(bench) == "Current"


async def test_a_rescale_and_a_replaced_worker_are_no_progress(bench: Bench) -> None:
    bench.put(model(1, 3))
    await bench.rest()
    bench.cluster.unready = True
    bench.cluster.kill(bench.cluster.workers("decode")[0]["metadata"]["name"])
    bench.cluster.control()
    await bench.once()
    assert verdict(bench) == "Current"
    bench.put(model(1, 2))
    await bench.once()
    for _ in range(10):
        assert verdict(bench) == "Current"
        await bench.once()
