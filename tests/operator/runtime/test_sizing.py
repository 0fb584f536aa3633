"""The law sizes the pools on the cluster: decided, recorded, carried out, and what keeps it from that."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forebay_operator.act.pending import HELD_SECONDS
from forebay_operator.api.labels import POOLS
from forebay_operator.homes import PENDING_LEAST_SECONDS
from forebay_operator.observe.traffic import Health, Signal
from support.fake_cluster import simulated_model
from support.fake_kube import Object, clone
from support.law_world import LawWorld, Load
from support.reconcile_bench import KEY, Bench

QUICK = {"scaleUp": {"stabilizationWindowSeconds": 5}, "scaleDown": {"stabilizationWindowSeconds": 30}}
HEAVY = Load(prompts=5, tokens=1500)
"""One and a half prefill workers."""

LONG = Load(decoding=70, context=1000)
"""Four and a half decode workers of 16,384 tokens."""


def model(fewest: int = 1, most: int = 4, **scaling: Any) -> Object:
    bounds = {pool: {"minReplicas": fewest, "maxReplicas": most} for pool in POOLS}
    made = simulated_model(scaling={**bounds, "behavior": QUICK, **scaling})
    made["spec"]["router"]["convertible"] = "Never"
    return {**made, "spec": {**made["spec"], "prefill": {}, "decode": {}}}


@pytest.fixture
async def world(bench: Bench) -> LawWorld:
    made = LawWorld(bench)
    await made.put(model())
    await made.live(75)
    assert made.pools() == (1, 1)
    return made


async def test_demand_grows_a_pool_and_its_end_shrinks_it_again(world: LawWorld) -> None:
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    decision = next(d for d in (world.status()["decision"], *world.status()["decisions"]) if d["action"] == "Scale")
    assert (decision["reason"], decision["from"], decision["to"]) == ("Short", "1:1", "2:1")
    assert world.targets() == (2, 1)
    assert world.bench.cluster.roles() == {"prefill": 2, "decode": 1}
    assert "needs 3 workers at 80% use and there are 2" in decision["message"]
    world.load = Load()
    await world.live_until((1, 1), 400)
    assert world.targets() == (1, 1)
    assert "Idle" in world.decisions()
    assert world.bench.cluster.deleted[-1][1] == 0, "nothing ran on the worker that left"


async def test_the_worker_that_leaves_is_drained_first(world: LawWorld) -> None:
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    world.load = Load()
    names = [pod["metadata"]["name"] for pod in world.bench.cluster.workers("prefill")]
    world.bench.cluster.running = dict.fromkeys(names, 1)
    for _ in range(400):
        world.bench.now += timedelta(seconds=1)
        await world.rescaler.look(KEY)
        await world.bench.once()
        if world.status()["memory"]["homes"]["prefill"] == 1:
            break
    for _ in range(20):
        await world.bench.once()
    assert world.pools() == (2, 1), "it finishes what runs there"
    assert world.status()["operation"]["cause"] == "ScaleIn"
    world.bench.cluster.running = {}
    await world.bench.rest()
    assert world.pools() == (1, 1)


async def test_one_pool_shrinks_at_a_time(world: LawWorld) -> None:
    world.load = Load(prompts=5, tokens=1500, decoding=25)
    await world.live(200)
    assert sum(world.pools()) == 5
    world.load = Load()
    seen = [world.pools()]
    for _ in range(900):
        await world.live(1)
        if world.pools() != seen[-1]:
            seen.append(world.pools())
    assert seen[-1] == (1, 1)
    assert all(sum(a) - sum(b) == 1 for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("scaling", "limit"), [({"maxGPUs": 2}, "Budget"), ({"pause": "ScaleUp"}, "Pause"), ({}, "Bounds")]
)
async def test_what_limits_growth_is_said(bench: Bench, scaling: dict[str, Any], limit: str) -> None:
    world = LawWorld(bench)
    made = model(most=1 if limit == "Bounds" else 4, **scaling)
    if limit == "Budget":
        made["spec"]["engine"] = {"type": "Native", "kvCache": {"memory": "1Gi"}}
        made["spec"]["model"]["source"] = "pvc://models/assistant"
    if limit == "Bounds":
        made["spec"]["scaling"]["decode"]["maxReplicas"] = 2
        made["spec"]["scaling"]["decode"]["minReplicas"] = 1
    await world.put(made)
    await world.live(75)
    world.load = LONG
    await world.live(60)
    most = (1, 2) if limit == "Bounds" else (1, 1)
    assert world.pools() == most
    assert limit in world.status()["decision"]["limitedBy"].split(",")
    assert world.bench.condition("ScalingLimited")[0] == "True"


async def test_a_pod_that_finds_no_node_is_undone_once_and_growth_waits(bench: Bench) -> None:
    bench.now = datetime.now(UTC)
    world = LawWorld(bench)
    await world.put(model())
    await world.live(75)
    world.bench.cluster.places = 2
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    await world.live(int(PENDING_LEAST_SECONDS) + 60)
    await world.bench.rest()
    assert world.pools() == (1, 1)
    assert world.bench.condition("ScalingLimited") == ("True", "NoRoom")
    assert "found a node within 300 s" in world.bench.message("ScalingLimited")
    assert world.bench.reasons().count("WorkerUndone") == 1
    until = datetime.fromisoformat(world.status()["memory"]["undone"]["prefill"]["until"])
    while world.bench.now < until - timedelta(seconds=10):
        await world.live(1)
        assert world.pools()[0] == 1, "it is not asked for again so soon"
    # The other pool's worker might find a place: it is asked for once, and waited for as long.
    await world.bench.rest()
    assert world.pools() == (1, 1)
    assert world.bench.reasons().count("WorkerUndone") == 2
    assert world.bench.condition("Ready")[0] == "True"


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
async def test_a_node_that_was_away_costs_a_pool_no_worker_for_good(bench: Bench, mode: str) -> None:
    """Where the law may not, nobody else would bring the pool back to what it had."""
    bench.now = datetime.now(UTC)
    world = LawWorld(bench)
    await world.put(model(mode=mode))
    held = clone(bench.api.find("disaggregatedmodels", "assistant"))
    held["status"]["memory"]["homes"]["decode"] = 2
    bench.api.put(held)
    await bench.rest()
    assert world.pools() == (1, 2)
    bench.cluster.places = 2
    bench.cluster.kill(bench.cluster.workers("decode")[0]["metadata"]["name"])
    bench.cluster.control()
    await bench.rest()
    bench.now += timedelta(seconds=PENDING_LEAST_SECONDS + 1)
    await bench.rest()
    assert world.pools() == (1, 1)
    bench.cluster.places = 3
    bench.now += timedelta(seconds=HELD_SECONDS)
    await bench.rest()
    assert world.pools() == (1, 2)
    assert bench.condition("ScalingLimited") != ("True", "NoRoom")


@pytest.mark.parametrize(("fewest", "load"), [(1, HEAVY), (2, Load(prompts=10, tokens=2000))], ids=["size", "both"])
async def test_recommend_says_each_advice_once_and_comes_to_rest(bench: Bench, fewest: int, load: Load) -> None:
    world = LawWorld(bench)
    await world.put(model(fewest=fewest, mode="Recommend"))
    await world.live(75)
    world.load = load
    await world.live(90)
    decision, earlier = world.status()["decision"], world.status()["decisions"]
    assert (decision["action"], decision["reason"]) == ("Recommend", "Short")
    await world.live(120)
    assert (world.status()["decision"], world.status()["decisions"]) == (decision, earlier)
    assert world.pools() == (fewest, fewest)


async def test_an_operator_that_is_restarted_while_a_pool_grows_neither_repeats_nor_drops_it(world: LawWorld) -> None:
    world.bench.cluster.unready = True
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    world.restart()
    await world.bench.rest()
    await world.live(100)
    assert world.pools() == (2, 1)
    world.bench.cluster.unready = False
    world.bench.cluster.cure()
    for pod in world.bench.cluster.workers():
        world.bench.cluster.set_ready(pod["metadata"]["name"], True)
    await world.bench.rest()
    assert world.bench.cluster.roles() == {"prefill": 2, "decode": 1}


async def test_how_long_workers_take_is_learnt_and_no_needs_are_kept_in_status(world: LawWorld) -> None:
    world.bench.cluster.unready = True
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    await world.live(40)
    world.bench.cluster.unready = False
    for pod in world.bench.cluster.workers():
        world.bench.cluster.set_ready(pod["metadata"]["name"], True)
    await world.bench.rest()
    await world.live(90)
    law = world.status()["memory"]["law"]
    (took,) = law["starts"]
    assert 40 <= took <= 90, "by the clock of the bench, which each pass of the reconciler puts forward"
    assert not law["memory"]["size"].get("needs")


async def test_sizes_that_others_set_are_theirs(bench: Bench) -> None:
    """/scale sets the sum: the law only splits it. With a fixed pool only the other one grows."""
    world = LawWorld(bench)
    scaled = model()
    scaled["spec"]["replicas"] = 2
    await world.put(scaled)
    await world.live(75)
    world.load = HEAVY
    await world.live(90)
    assert world.pools() == (1, 1)
    half = clone(model())
    half["spec"]["prefill"] = {"replicas": 1}
    del half["spec"]["scaling"]["prefill"]
    await world.put(half)
    await world.live(120)
    assert world.pools()[0] == 1


async def test_without_role_switching_pools_are_sized_and_workers_serve_at_home(bench: Bench) -> None:
    world = LawWorld(bench)
    await world.put(model(fewest=2, roleSwitching="Disabled"))
    await world.live(75)
    world.load = Load(prompts=10, tokens=1500)
    await world.live(200)
    assert world.pools()[0] > 2
    assert world.bench.cluster.roles() == dict(zip(POOLS, world.pools(), strict=True))
    assert world.targets() == world.pools()


@pytest.mark.parametrize(
    ("ratio", "begins", "ends"),
    [
        ({"min": "1:2", "max": "1:2"}, (1, 2), (1, 2)),
        ({"min": "1:1", "max": "1:1"}, (1, 1), (2, 2)),
        ({"min": "1:1", "max": "1:1"}, (1, 2), (2, 2)),
    ],
    ids=["no split within the rate", "the next total has none", "the present total has none"],
)
async def test_pools_grow_to_totals_that_the_ratio_can_split(
    bench: Bench, ratio: dict[str, str], begins: tuple[int, int], ends: tuple[int, int]
) -> None:
    """On another total the law would hold its split, as none is right, and then its sizes for ever."""
    world = LawWorld(bench)
    await world.put(model(ratio=ratio))
    held = clone(bench.api.find("disaggregatedmodels", "assistant"))
    held["status"]["memory"]["homes"] = {"prefill": begins[0], "decode": begins[1]}
    bench.api.put(held)
    await bench.rest()
    world.load = Load(prompts=5, tokens=2000)
    await world.live(150)
    assert world.targets() == ends
    assert sum(world.pools()) == sum(ends)
    if begins == ends:
        assert "Ratio" in world.status()["decision"]["limitedBy"]


async def test_without_role_switches_the_ratio_binds_the_pools_and_does_not_freeze_them(bench: Bench) -> None:
    world = LawWorld(bench)
    narrow = {"ratio": {"min": "1:4", "max": "1:1"}, "roleSwitching": "Disabled"}
    await world.put(model(**narrow))
    await world.live(75)
    world.load = HEAVY
    await world.live_until((2, 2), 90)
    world.load = Load(prompts=10, tokens=1500)
    await world.live_until((4, 4), 200)
    await world.put(model(ratio={"min": "4:1", "max": "9:1"}, roleSwitching="Disabled"))
    world.load = Load()
    await world.live_until((4, 1), 400)


async def test_a_size_set_by_scale_waits_for_a_node_as_long_as_it_takes(bench: Bench) -> None:
    """A Pending pod is what a cluster autoscaler goes by."""
    bench.now = datetime.now(UTC)
    bench.cluster.places = 3
    world = LawWorld(bench)
    scaled = model()
    scaled["spec"]["replicas"] = 4
    await world.put(scaled)
    bench.now += timedelta(seconds=PENDING_LEAST_SECONDS + 1)
    await bench.rest()
    assert sum(world.pools()) == 4
    assert "undone" not in world.status()["memory"]


async def test_a_pools_loans_outlast_a_change_of_its_size(bench: Bench) -> None:
    world = LawWorld(bench)
    await world.put(simulated_model(2, 4, scaling={"mode": "Recommend"}))
    held = clone(bench.api.find("disaggregatedmodels", "assistant"))
    held["status"]["prefill"]["target"], held["status"]["decode"]["target"] = 1, 5
    bench.api.put(held)
    await bench.rest()
    assert world.targets() == (1, 5)
    await world.put(simulated_model(3, 4, scaling={"mode": "Recommend"}))
    assert world.targets() == (2, 5)


# What goes wrong meanwhile: no worker comes or goes for it, what is wrong is named, and it ends by itself.

FAULTS = [
    Signal("prometheus", "Prometheus", Health.STALE, note="no answer for 90 s: connection refused"),
    Signal("prometheus", "Prometheus", Health.INVALID, note="HTML instead of JSON"),
    Signal("worker prefill-1 load", "/load", Health.STALE, note="its last report is 9 s old and routers still send"),
    Signal("router 10.0.0.1:8000", "/load", Health.MISSING, note="no use for 6 s: status 500"),
]


@pytest.mark.parametrize("bad", FAULTS, ids=lambda signal: f"{signal.name.split()[0]}-{signal.health}")
async def test_metrics_that_fail_size_nothing_are_named_and_recover(world: LawWorld, bad: Signal) -> None:
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    world.bad, world.load = bad, Load()
    await world.live(400)
    assert world.pools() == (2, 1), "that nothing is heard is no reason to shrink"
    assert world.bench.condition("MetricsAvailable") == ("False", bad.health.value)
    assert bad.name in world.bench.message("MetricsAvailable")
    assert world.bench.condition("Ready")[0] == "True"
    world.bad = None
    await world.live(2)
    assert world.pools() == (2, 1), "the windows start anew"
    assert world.bench.condition("MetricsAvailable") == ("True", "Fresh")
    await world.live_until((1, 1), 400)


@pytest.mark.parametrize("skew", [-300.0, 300.0])
async def test_the_next_leaders_clock_is_five_minutes_off(world: LawWorld, skew: float) -> None:
    world.load = HEAVY
    await world.live_until((2, 1), 90)
    world.skew = skew
    world.restart()
    await world.bench.rest()
    await world.live(100)
    assert world.pools() == (2, 1)
    world.load = Load()
    await world.live_until((1, 1), 800)


async def test_an_autoscaler_on_a_child_has_its_way_and_the_law_leaves_that_pool_alone(world: LawWorld) -> None:
    name = world.bench.deployment("prefill")["metadata"]["name"]

    def autoscaler() -> None:
        if world.bench.deployment("prefill")["spec"]["replicas"] != 3:
            obj = clone(world.bench.api.find("deployments", name))
            obj["spec"]["replicas"] = 3
            obj["metadata"]["managedFields"] = [{
                "manager": "kube-controller-manager", "operation": "Update", "subresource": "scale",
                "time": world.bench.now.isoformat(), "fieldsV1": {"f:spec": {"f:replicas": {}}},
            }]  # fmt: skip
            world.bench.api.put(obj)
            world.bench.cluster.control()

    for _ in range(12):
        autoscaler()
        for _ in range(8):
            await world.bench.once()
        world.bench.now += timedelta(seconds=10)
    assert world.bench.condition("ForeignWriter") == ("True", "Contested")
    world.load = LONG
    for _ in range(60):
        await world.live(1)
        autoscaler()
    assert world.pools()[0] == 3, "it has its way"
    assert world.pools()[1] > 1, "the law grows its own pool only"
    assert world.status()["memory"]["homes"]["prefill"] == 1
    world.load = Load()
    await world.live(200)
    assert world.pools()[0] == 3, "nor does it shrink the other's"
