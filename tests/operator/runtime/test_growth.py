"""Growth within the GPUs that there are, and places that move from one pool to the other."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.act.growth import Rules, held_gpus
from forebay_operator.act.operation import Cause, Operation
from forebay_operator.act.plan import plan
from forebay_operator.api.labels import Pool
from forebay_operator.observe.types import PodView
from support.plan_world import NOW, goals, running

SHARED = Rules(timedelta(seconds=60), gpus={"prefill": 1, "decode": 1}, max_gpus=4, one_resource=True)


def test_growing_one_pool_by_shrinking_the_other_is_one_operation() -> None:
    """Leave, wait until the GPUs are free, grow: by one record that a restart in between goes on from."""
    world = running({"prefill-r1": 3, "decode-r1": 1})
    world.linger = 3
    operation: Operation | None = None
    seen: list[tuple[str, int, int, int]] = []
    for _ in range(40):
        step = plan(world.observe(), goals(2, 2), operation, frozenset(world.fenced), SHARED, world.now)
        recorded = None if operation is None else operation.to_status()
        if (None if step.operation is None else step.operation.to_status()) != recorded:
            operation = step.operation
            continue
        world.act(step)
        world.control()
        # Every look starts from the record alone, as after a restart.
        operation = Operation.from_status(recorded)
        leaving = sum(p.terminating for p in world.pods)
        cause = "" if operation is None else operation.cause.value
        row = (cause, world.replicas["prefill-r1"], world.replicas["decode-r1"], leaving)
        if not seen or seen[-1] != row:
            seen.append(row)
    assert world.replicas == {"prefill-r1": 2, "decode-r1": 2}
    assert operation is None
    assert seen == [("MoveWorker", 3, 1, 0), ("MoveWorker", 2, 1, 1), ("MoveWorker", 2, 1, 0), ("MoveWorker", 2, 2, 0),
                    ("", 2, 2, 0)]  # fmt: skip


def test_a_move_that_is_not_wanted_any_more_ends() -> None:
    world = running({"prefill-r1": 2, "decode-r1": 1})
    moving = Operation(Cause.MOVE, "prefill", "prefill-r1", 2, "gone", "gone", NOW, NOW, "decode-r1", 2)
    step = plan(world.observe(), goals(2, 1), moving, frozenset(), SHARED, NOW)
    assert (step.operation, step.replicas) == (None, {"prefill-r1": 2, "decode-r1": 1})
    step = plan(world.observe(), goals(2, 2), moving, frozenset(), SHARED, NOW)
    assert step.replicas == {"prefill-r1": 2, "decode-r1": 2}


def test_the_next_worker_moves_once_the_last_one_serves() -> None:
    world = running({"prefill-r1": 4, "decode-r1": 2})
    world.pods = [replace(p, ready=p.name != "decode-r1-6", node="n") for p in world.pods]
    step = plan(world.observe(), goals(2, 4), None, frozenset(), SHARED, NOW)
    assert step.operation is None
    assert step.waiting == "for decode workers to be ready before another is moved there"


def test_growth_counts_the_gpus_of_leaving_pods() -> None:
    world = running({"prefill-r1": 1, "decode-r1": 2})
    rules = Rules(timedelta(seconds=60), gpus={"prefill": 1, "decode": 2}, max_gpus=9)
    leaving = PodView("old", "decode", "r0", "u-old", terminating=True)
    seen = replace(world.observe(), pods=(*world.pods, leaving))
    assert held_gpus(seen, goals(1, 4), rules, {}) == 7
    step = plan(seen, goals(1, 4), None, frozenset(), rules, NOW)
    assert step.replicas["decode-r1"] == 3
    assert step.limits == (
        "for GPUs: 2 more decode workers need 4, and 7 of scaling.maxGPUs 9 are held (2 of them by leaving pods)",
    )
    assert step.again is not None, "it is looked at again"
    gone = plan(world.observe(), goals(1, 4), None, frozenset(), rules, NOW)
    assert (gone.replicas["decode-r1"], gone.limits) == (4, ())


@settings(max_examples=80, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["r1", "r2"])), min_size=1, max_size=4
    ),
    each=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    surge=st.integers(0, 1),
    linger=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_the_budget_holds_on_every_path(
    moves: list[tuple[int, int, str]], each: tuple[int, int], surge: int, linger: int, seed: int
) -> None:
    """Pods of both pools, leaving ones among them, never hold more GPUs than allowed; and the goal is reached."""
    sizes = [moves[0][:2], *(move[:2] for move in moves)]
    most = max(prefill * each[0] + decode * each[1] for prefill, decode in sizes)
    world = running({"prefill-r1": sizes[0][0], "decode-r1": sizes[0][1]})
    world.linger = linger
    gpus: dict[Pool, int] = {"prefill": each[0], "decode": each[1]}
    rules = Rules(timedelta(seconds=60), 1, surge, gpus=gpus, max_gpus=most, one_resource=True)
    rng = random.Random(seed)
    operation: Operation | None = None
    for prefill, decode, revision in moves:
        wanted = goals(prefill, decode, revision)
        for _ in range(400):
            step = plan(world.observe(), wanted, operation, frozenset(world.fenced), rules, world.now)
            if step.operation != operation:
                operation = step.operation
                continue
            before = dict(world.replicas)
            world.act(step)
            if rng.random() < 0.8:
                world.control()
            held = sum(gpus[p.pool] for p in world.pods)
            assert held <= most
            leaving = any(p.terminating for p in world.pods)
            if step.again is None and operation is None and not leaving and world.replicas == before:
                break
        else:
            raise AssertionError(f"no rest: {step}")
        assert {name: n for name, n in world.replicas.items() if n} == {
            f"prefill-{revision}": prefill,
            f"decode-{revision}": decode,
        }
