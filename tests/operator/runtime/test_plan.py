"""The plan of replicas and leaving workers: by table, and by a simulated cluster that runs it to its end."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.act.growth import Rules
from forebay_operator.act.operation import Cause, Operation
from forebay_operator.act.plan import Plan, plan
from forebay_operator.observe.types import LatencyView, Observation
from forebay_wire.load import LoadReport
from support.plan_world import NOW, RULES, World, goals, report, running, settle


def test_makes_what_is_missing() -> None:
    step = plan(Observation(1), goals(2, 3), None, frozenset(), RULES, NOW)
    assert step == Plan({"prefill-r1": 2, "decode-r1": 3})


def test_scale_in_takes_the_idlest_and_waits_for_it() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 3})
    world.change("decode-r1-2", load=report(5))
    world.change("decode-r1-3", load=report(0, held=2))
    world.change("decode-r1-4", load=report(7))
    wanted = goals(1, 2)
    step = plan(world.observe(), wanted, None, frozenset(), RULES, NOW)
    assert step.operation is not None
    assert (step.operation.pod, step.operation.replicas, step.operation.cause) == ("decode-r1-3", 2, Cause.SCALE_IN)
    assert step.replicas["decode-r1"] == 3
    assert step.fence is None, "nothing happens before the record is written"

    def again() -> Plan:
        return plan(world.observe(), wanted, step.operation, frozenset(world.fenced), RULES, world.now)

    assert again().fence == "decode-r1-3"
    world.change("decode-r1-3", draining=True)
    waiting = again()
    assert (waiting.silence, waiting.shrink, waiting.again is not None) == (None, None, True)
    world.change("decode-r1-3", load=report())
    assert again().silence is None, "a router may still send to it"
    world.fenced.add("decode-r1-3")
    assert again().silence == "decode-r1-3"
    world.change("decode-r1-3", ready=False)
    assert (again().shrink, again().replicas["decode-r1"]) == ("decode-r1", 2)


def test_scale_in_leaves_the_last_of_a_role_where_one_on_loan_can_go() -> None:
    """Two of the decode pool, one of them lent to prefill and busier: the other is all that decodes."""
    world = running({"prefill-r1": 2, "decode-r1": 2})
    lent, last = [p.name for p in world.pods if p.pool == "decode"]
    world.change(lent, role="prefill", load=report(running=3))
    for pod in world.pods:
        world.change(pod.name, role=pod.role or pod.pool)
    step = plan(world.observe(), goals(2, 1), None, frozenset(), RULES, NOW)
    assert step.operation is not None
    assert step.operation.pod == lent
    world.change(lent, role="decode")
    step = plan(world.observe(), goals(2, 1), None, frozenset(), RULES, NOW)
    assert step.operation is not None
    assert step.operation.pod == last, "else the idlest"


@pytest.mark.parametrize("load", [None, report(3)])
def test_the_deadline_ends_the_wait(load: LoadReport | None) -> None:
    world = running({"prefill-r1": 1, "decode-r1": 2})
    world.pods = [replace(p, load=load, load_age_seconds=0.1) for p in world.pods]
    operation = plan(world.observe(), goals(1, 1), None, frozenset(), RULES, NOW).operation
    assert operation is not None
    world.change(operation.pod, draining=True)

    def at(seconds: float) -> Plan:
        now = NOW + timedelta(seconds=seconds)
        return plan(world.observe(), goals(1, 1), operation, frozenset({operation.pod}), RULES, now)

    assert at(599).silence is None
    assert at(600).silence == operation.pod
    assert at(614).shrink is None
    assert at(615).shrink == "decode-r1", "a worker that will not turn NotReady does not hold it up for ever"


def test_a_clock_set_back_does_not_stretch_the_deadline() -> None:
    operation = Operation(Cause.SCALE_IN, "decode", "d", 1, "p", "u", NOW, NOW + timedelta(seconds=60))
    back = NOW - timedelta(days=3)
    assert operation.until(back).deadline == back + timedelta(seconds=60)
    assert operation.until(NOW + timedelta(seconds=5)) == operation


def test_a_stale_report_is_no_proof_of_idleness() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 2})
    operation = plan(world.observe(), goals(1, 1), None, frozenset(), RULES, NOW).operation
    assert operation is not None
    world.change(operation.pod, draining=True, load_age_seconds=30.0)
    step = plan(world.observe(), goals(1, 1), operation, frozenset({operation.pod}), RULES, NOW)
    assert step.silence is None


def test_when_another_pod_was_taken_the_victim_is_released() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 3})
    operation = plan(world.observe(), goals(1, 2), None, frozenset(), RULES, NOW).operation
    assert operation is not None
    world.change(operation.pod, draining=True, ready=False)
    world.replicas["decode-r1"] = 2
    survivor = next(p for p in world.pods if p.pool == "decode" and p.name != operation.pod)
    world.pods.remove(survivor)
    step = plan(world.observe(), goals(1, 2), operation, frozenset(), RULES, NOW)
    assert step.operation is None
    assert step.release == (operation.pod,)


@pytest.mark.parametrize("ready", [False, True])
def test_a_victim_that_went_by_itself(ready: bool) -> None:
    """Evicted while no operator looked, say. Its replacement may serve by now: then the count may not just follow."""
    world = running({"prefill-r1": 1, "decode-r1": 3})
    operation = plan(world.observe(), goals(1, 2), None, frozenset(), RULES, NOW).operation
    assert operation is not None
    world.pods = [p for p in world.pods if p.uid != operation.uid]
    world.control(ready=ready)
    replacement = next(p for p in world.pods if p.name == "decode-r1-5")
    assert replacement.ready is ready
    step = plan(world.observe(), goals(1, 2), operation, frozenset(), RULES, NOW)
    assert (step.shrink, step.replicas["decode-r1"]) == ((None, 3) if ready else ("decode-r1", 2))
    world.change("decode-r1-5", load=report(running=4))
    settle(world, goals(1, 2), operation=operation)
    (gone,) = world.deleted
    assert gone.draining or not ready, "who serves is drained first"
    assert (gone.name == replacement.name) is not ready


def test_a_spec_taken_back_releases_the_victim() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 3})
    operation = plan(world.observe(), goals(1, 2), None, frozenset(), RULES, NOW).operation
    assert operation is not None
    world.change(operation.pod, draining=True)
    step = plan(world.observe(), goals(1, 3), operation, frozenset(), RULES, NOW)
    assert (step.operation, step.release, step.replicas["decode-r1"]) == (None, (operation.pod,), 3)


def test_rollout_without_room_goes_one_by_one() -> None:
    world = running({"prefill-r1": 2, "decode-r1": 3})
    wanted = goals(2, 3, "r2")
    most, fewest = 0, 99
    operation: Operation | None = None
    for _ in range(200):
        step = plan(world.observe(), wanted, operation, frozenset(world.fenced), RULES, world.now)
        if step.operation != operation:
            operation = step.operation
            continue
        world.act(step)
        world.control()
        most, fewest = max(most, len(world.pods)), min(fewest, sum(p.serving for p in world.pods))
    assert {p.revision for p in world.pods} == {"r2"}
    assert most == 5, "never more pods than there is room for"
    assert fewest == 4, "never more than one away"
    assert world.replicas == {"prefill-r2": 2, "decode-r2": 3}, "the old Deployments are removed"


def test_rollout_waits_for_the_new_worker() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 3, "decode-r2": 0, "prefill-r2": 0})
    world.replicas.update({"decode-r1": 2, "decode-r2": 1, "prefill-r1": 0, "prefill-r2": 1})
    world.control(ready=False)
    world.pods = [replace(p, ready=p.revision == "r1" or p.pool == "prefill") for p in world.pods]
    step = plan(world.observe(), goals(1, 3, "r2"), None, frozenset(), RULES, NOW)
    assert step.operation is None
    assert step.again is not None
    assert "2 of 3" in step.waiting


def test_at_one_and_one_the_other_worker_must_serve_first() -> None:
    world = World({"prefill-r1": 0, "prefill-r2": 1, "decode-r1": 1, "decode-r2": 0})
    world.control(ready=False)
    world.pods = [replace(p, ready=p.pool == "decode") for p in world.pods]
    step = plan(world.observe(), goals(1, 1, "r2"), None, frozenset(), RULES, NOW)
    assert (step.operation, step.waiting) == (None, "for prefill workers to be ready: 0 of 1 are")
    world.pods = [replace(p, ready=True) for p in world.pods]
    known = replace(world.observe(), latency=LatencyView())
    assert plan(known, goals(1, 1, "r2"), None, frozenset(), RULES, NOW).operation is not None
    strange = replace(known, pods=tuple(replace(p, load=p.load if p.pool == "decode" else None) for p in known.pods))
    assert plan(strange, goals(1, 1, "r2"), None, frozenset(), RULES, NOW).operation is None, "no router knows it yet"


def test_a_revision_that_cannot_be_made_takes_nobody() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 1})
    step = plan(world.observe(), goals(1, 1, "r2"), None, frozenset(), RULES, NOW)
    assert step.operation is None


def test_surge_adds_before_it_takes() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 1})
    rules = Rules(timedelta(seconds=60), max_unavailable=0, max_surge=1)
    fewest = 99
    operation: Operation | None = None
    for _ in range(60):
        step = plan(world.observe(), goals(1, 1, "r2"), operation, frozenset(world.fenced), rules, world.now)
        if step.operation != operation:
            operation = step.operation
            continue
        world.act(step)
        world.control()
        for pool in ("prefill", "decode"):
            fewest = min(fewest, sum(p.serving for p in world.pods if p.pool == pool))
    assert world.replicas == {"prefill-r2": 1, "decode-r2": 1}
    assert fewest == 1


def test_rollback_in_the_middle() -> None:
    world = running({"prefill-r1": 2, "decode-r1": 3})
    operation: Operation | None = None
    for _ in range(9):
        step = plan(world.observe(), goals(2, 3, "r2"), operation, frozenset(world.fenced), RULES, world.now)
        if step.operation != operation:
            operation = step.operation
            continue
        world.act(step)
        world.control()
    assert {p.revision for p in world.pods} == {"r1", "r2"}
    settle(world, goals(2, 3, "r1"), operation=operation)
    assert {p.revision for p in world.pods} == {"r1"}
    assert world.replicas == {"prefill-r1": 2, "decode-r1": 3}


@settings(max_examples=120, deadline=None)
@given(
    start=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    moves=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["r1", "r2", "r3"])), min_size=1, max_size=4
    ),
    unavailable=st.integers(1, 2),
    surge=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_any_path_with_restarts_ends_where_it_should(
    start: tuple[int, int], moves: list[tuple[int, int, str]], unavailable: int, surge: int, seed: int
) -> None:
    """Whatever the spec goes through, and wherever a restart falls: the pods of the last spec, nobody left fenced, and
    no worker taken while requests run on it."""
    world = running({"prefill-r1": start[0], "decode-r1": start[1]})
    rules = Rules(timedelta(seconds=600), unavailable, surge)
    rng = random.Random(seed)
    operation: Operation | None = None
    for prefill, decode, revision in moves:
        operation = settle(world, goals(prefill, decode, revision), rules, operation, steps=600, forget=rng)
    prefill, decode, revision = moves[-1]
    assert world.replicas == {f"prefill-{revision}": prefill, f"decode-{revision}": decode}
    assert sorted(p.pool for p in world.pods) == sorted(["prefill"] * prefill + ["decode"] * decode)
    assert not any(p.draining for p in world.pods)
    assert operation is None
    assert all(p.draining for p in world.deleted), "every worker that went was fenced before"


def test_the_record_survives_its_way_through_status() -> None:
    operation = Operation(Cause.ROLLOUT, "decode", "d", 1, "p", "u", NOW, NOW + timedelta(seconds=60))
    assert Operation.from_status(operation.to_status()) == operation
    for broken in (
        {},
        None,
        {"kind": "Other"},
        {**operation.to_status(), "deadline": "soon"},
        {"kind": "RemoveWorker"},
    ):
        assert Operation.from_status(broken) is None
