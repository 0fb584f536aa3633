"""Growing where there is not room for all: GPUs that leaving pods still hold, workers that no node takes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.act.pending import HELD_SECONDS, Undone, Waits, undo_pending
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.scaling import Bounds
from forebay_operator.homes import PENDING_LEAST_SECONDS
from forebay_operator.observe.types import DeploymentView, Observation, PodView
from support.fake_cluster import native_model
from support.fake_kube import Object, clone
from support.reconcile_bench import Bench

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
BOUNDS = {pool: Bounds.model_validate({"minReplicas": 1, "maxReplicas": 8}) for pool in POOLS}


def seen(placed: int, unplaced: int, age: float = 999.0, **values: Any) -> Observation:
    created = NOW.timestamp() - age
    pods = [PodView(f"d{i}", "decode", "r1", node="n", ready=True) for i in range(placed)]
    pods += [PodView(f"u{i}", "decode", "r1", created_unix=created, **values) for i in range(unplaced)]
    total = placed + unplaced
    return Observation(
        1, tuple(pods), (DeploymentView("d", "decode", "r1", total), DeploymentView("p", "prefill", "r", 1))
    )


@pytest.mark.parametrize(
    ("observation", "asked", "count"),
    [
        (seen(3, 1), 4, 3),
        (seen(3, 1, age=PENDING_LEAST_SECONDS - 1), 4, 4),
        (seen(3, 0), 4, 4),
        (seen(3, 1, terminating=True), 4, 4),
        (seen(0, 2), 2, 1),
        (seen(3, 1), 3, 3),
    ],
    ids=["late", "young", "none", "leaving", "never below the fewest", "already without it"],
)
def test_a_worker_without_a_node_is_undone(observation: Observation, asked: int, count: int) -> None:
    placed = undo_pending({"prefill": 1, "decode": asked}, BOUNDS, observation, {}, NOW)
    assert placed.counts == {"prefill": 1, "decode": count}
    assert placed.fresh == (("decode",) if count < asked else ())


@pytest.mark.parametrize("ahead", [-900.0, -300.0, 0.0, 300.0, 900.0])
def test_the_wait_is_the_observers_whatever_the_api_servers_clock_says(ahead: float) -> None:
    observation, asked = seen(3, 1, age=ahead, uid="u"), dict[Pool, int](prefill=1, decode=4)
    waits = Waits()
    for after, count in ((0.0, 4), (PENDING_LEAST_SECONDS - 1, 4), (PENDING_LEAST_SECONDS, 3)):
        placed = undo_pending(asked, BOUNDS, observation, {}, NOW, waited=waits.look(observation, 50.0 + after))
        assert placed.counts["decode"] == count
        assert placed.wake == (None if count == 3 else PENDING_LEAST_SECONDS - after)


def test_a_wait_ends_with_a_node_and_is_the_pods_own() -> None:
    """Names may come again, uids do not."""
    waits = Waits()
    assert waits.look(seen(1, 1, uid="u"), 10.0) == {"u": 0.0}
    assert waits.look(seen(1, 1, uid="u"), 40.0) == {"u": 30.0}
    assert waits.look(seen(1, 1, uid="other"), 50.0) == {"other": 0.0}
    assert waits.look(seen(2, 0), 60.0) == {}


def test_a_fixed_size_is_left_alone() -> None:
    fixed = {pool: Bounds.model_validate({"minReplicas": 4, "maxReplicas": 4}) for pool in POOLS}
    assert undo_pending({"prefill": 4, "decode": 4}, fixed, seen(3, 1), {}, NOW).counts["decode"] == 4


def test_who_waits_in_a_rollout_waits_for_a_place() -> None:
    observation = seen(3, 1)
    older = DeploymentView("old", "decode", "r0", 1)
    rolling = Observation(1, observation.pods, (*observation.deployments, older))
    assert undo_pending({"prefill": 1, "decode": 4}, BOUNDS, rolling, {}, NOW).counts["decode"] == 4


def test_it_is_held_for_a_while_and_asked_again_then() -> None:
    remembered = {"decode": Undone(4, 3, NOW + timedelta(seconds=60)).to_status()}
    asked: dict[Pool, int] = {"prefill": 1, "decode": 4}
    assert undo_pending(asked, BOUNDS, seen(3, 0), remembered, NOW).counts["decode"] == 3
    later = undo_pending(asked, BOUNDS, seen(3, 0), remembered, NOW + timedelta(seconds=60))
    assert (later.counts["decode"], later.undone) == (4, {})
    back = undo_pending(asked, BOUNDS, seen(3, 0), remembered, NOW - timedelta(seconds=HELD_SECONDS))
    assert back.counts["decode"] == 4, "a clock that was set back holds nothing for longer"


def test_where_no_law_sizes_pools_what_was_undone_is_asked_for_again() -> None:
    """status keeps the lowered count: nobody else would."""
    until = NOW + timedelta(seconds=60)
    remembered = {"decode": Undone(12, 2, until).to_status()}
    lowered: dict[Pool, int] = {"prefill": 1, "decode": 2}
    held = undo_pending(lowered, BOUNDS, seen(2, 0), remembered, NOW, ask_again=True)
    assert held.counts["decode"] == 2
    again = undo_pending(lowered, BOUNDS, seen(2, 0), remembered, until, ask_again=True)
    assert again.counts["decode"] == BOUNDS["decode"].max_replicas, "never past the bounds of now"
    assert undo_pending(lowered, BOUNDS, seen(2, 0), remembered, until).counts["decode"] == 2, "the law's"
    worse = undo_pending({"prefill": 1, "decode": 12}, BOUNDS, seen(1, 1), remembered, NOW, ask_again=True)
    assert (worse.undone["decode"].asked, worse.counts["decode"]) == (12, 1), "a second loss hides no earlier one"


@given(
    st.dictionaries(st.sampled_from(["prefill", "decode", "x"]), st.none() | st.integers() | st.dictionaries(
        st.sampled_from(["asked", "placed", "until"]), st.none() | st.integers(-9, 9) | st.text(max_size=5))),
    st.integers(0, 5), st.integers(0, 5), st.integers(1, 8),
)  # fmt: skip
def test_any_memory_gives_counts_within_bounds(memory: dict[str, Any], placed: int, unplaced: int, asked: int) -> None:
    made = undo_pending({"prefill": 1, "decode": asked}, BOUNDS, seen(placed, unplaced), memory, NOW)
    assert 1 <= made.counts["decode"] <= asked


def scaled() -> Object:
    """Decode has bounds instead of a size."""
    made = native_model(1, 1, scaling={"decode": {"minReplicas": 1, "maxReplicas": 8}})
    made["spec"]["decode"] = {}
    return made


async def grow_past_the_nodes(bench: Bench) -> None:
    """Four decode workers are asked for, of which three pods in all have a place."""
    bench.cluster.places = 3
    bench.put(scaled())
    await bench.rest()
    held = clone(bench.api.find("disaggregatedmodels", "assistant"))
    held["status"]["memory"]["homes"]["decode"] = 4
    bench.api.put(held)


async def test_growing_past_the_nodes_is_undone_told_and_tried_again(bench: Bench) -> None:
    bench.now = datetime.now(UTC)
    await grow_past_the_nodes(bench)
    for _ in range(5):
        wait = await bench.once()
    assert len(bench.cluster.workers("decode")) == 4
    assert wait is not None
    assert wait <= PENDING_LEAST_SECONDS, "it looks again when the deadline has come"
    bench.now += timedelta(seconds=PENDING_LEAST_SECONDS)
    await bench.rest()
    assert len(bench.cluster.workers("decode")) == 2
    assert bench.condition("ScalingLimited") == ("True", "NoRoom")
    assert "decode: 4 workers were asked for and 2 found a node within 300 s" in bench.message("ScalingLimited")
    assert bench.reasons().count("WorkerUndone") == 1
    assert bench.condition("Ready")[0] == "True"
    bench.restart()
    await bench.rest()
    assert len(bench.cluster.workers("decode")) == 2
    assert bench.condition("ScalingLimited") == ("True", "NoRoom"), "a restart forgets nothing"
    bench.now += timedelta(seconds=HELD_SECONDS)
    await bench.rest()
    assert bench.condition("ScalingLimited") != ("True", "NoRoom"), "it clears by itself"


@pytest.mark.parametrize("ahead", [-600, 600])
async def test_an_operator_whose_clock_is_off_gives_a_new_worker_its_time(bench: Bench, ahead: int) -> None:
    bench.now = datetime.now(UTC) + timedelta(seconds=ahead)
    await grow_past_the_nodes(bench)
    for _ in range(5):
        await bench.once()
    bench.restart()
    await bench.once()
    assert len(bench.cluster.workers("decode")) == 4
    bench.now += timedelta(seconds=PENDING_LEAST_SECONDS)
    await bench.rest()
    assert len(bench.cluster.workers("decode")) == 2


async def test_growth_waits_for_the_gpus_of_a_leaving_pod(bench: Bench) -> None:
    bench.put(native_model(1, 2, scaling={"maxGPUs": 4}))
    await bench.rest()
    bench.cluster.kubelet = True
    victim = bench.cluster.workers("decode")[0]["metadata"]["name"]
    bench.cluster.kill(victim)
    bench.cluster.control()
    bench.put(native_model(1, 3, scaling={"maxGPUs": 4}))
    for _ in range(6):
        await bench.once()
    assert bench.deployment("decode")["spec"]["replicas"] == 2
    assert bench.condition("ScalingLimited") == ("True", "NoRoom")
    assert "4 of scaling.maxGPUs 4 are held (1 of them by leaving pods)" in bench.message("ScalingLimited")
    bench.api.remove("pods", victim)
    for _ in range(6):
        await bench.once()
    assert bench.deployment("decode")["spec"]["replicas"] == 3
    assert bench.condition("ScalingLimited") != ("True", "NoRoom")


async def test_a_place_moves_from_one_pool_to_the_other(bench: Bench) -> None:
    """Never more pods than GPUs, and one recorded operation for each place."""
    bench.put(native_model(3, 1, scaling={"maxGPUs": 4}))
    await bench.rest()
    most = 0

    def watch() -> None:
        nonlocal most
        bench.cluster.control()
        most = max(most, len(bench.cluster.workers()))

    bench.api.on_write = watch
    bench.put(native_model(1, 3, scaling={"maxGPUs": 4}))
    await bench.rest()
    assert bench.cluster.roles() == {"prefill": 1, "decode": 3}
    assert most == 4
    leaves = [e for e in bench.api.all("events") if e["reason"] == "WorkerLeaves"]
    assert [event["action"] for event in leaves] == ["MoveWorker", "MoveWorker"]


async def test_a_pod_that_is_stuck_terminating_holds_up_nothing_for_ever(bench: Bench) -> None:
    """Its node is gone: the move that waits for its GPUs ends, and what else there is to do is done."""
    bench.put(native_model(2, 1, drain={"timeoutSeconds": 30}))
    await bench.rest()
    bench.cluster.kubelet = True
    bench.put(native_model(1, 2, drain={"timeoutSeconds": 30}))
    for _ in range(40):
        await bench.once()
    assert bench.live()["operation"]["grows"], "it waits for the place"
    assert bench.deployment("decode")["spec"]["replicas"] == 1
    bench.now += timedelta(seconds=30 + 30 + 120)
    bench.cluster.kubelet = False
    await bench.rest()
    assert "operation" not in bench.live()
    assert bench.deployment("decode")["spec"]["replicas"] == 2
    stuck = [p for p in bench.cluster.workers() if p["metadata"].get("deletionTimestamp")]
    assert len(stuck) == 1
    bench.put(native_model(1, 1, drain={"timeoutSeconds": 30}))
    await bench.rest()
    assert bench.deployment("decode")["spec"]["replicas"] == 1, "the next operation is carried out"
