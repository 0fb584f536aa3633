"""Sizing of pools that serve at home only: each by its own demand, whatever the other has or lacks."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api.ratio import Ratio
from forebay_operator.decide import Bounds, Rate, Rules, Split, reasons
from forebay_operator.decide.memory import Memory, Need, Sized, SizeMemory
from forebay_operator.decide.size import sized
from support.plant import QUICK, Plant

HOME = dataclasses.replace(QUICK, homes_serve=True)
ONE_TO_ONE = Bounds(ratio_min=Ratio(1, 1), ratio_max=Ratio(1, 1))
NO_MORE_PREFILL = Bounds(ratio_min=Ratio(1, 4), ratio_max=Ratio(1, 1))


@pytest.mark.parametrize(
    ("pools", "demand", "reason", "target"),
    [
        ((2, 2), (1.5, 1.5), reasons.FITS, (2, 2)),
        ((2, 2), (1.7, 1.7), reasons.FITS, (2, 2)),  # within the tolerance
        ((2, 6), (2.2, 1.5), reasons.SHORT, (3, 6)),  # four to spare at decode help no prompt
        ((6, 2), (1.5, 2.2), reasons.SHORT, (6, 3)),
        ((2, 2), (3.0, 3.0), reasons.SHORT, (3, 3)),  # two of four: the rate is of the sum
        ((2, 2), (3.0, 1.5), reasons.SHORT, (4, 2)),
        ((2, 2), (0.5, 1.5), reasons.STABILIZING, (2, 2)),
        ((1, 1), (0.0, 0.0), reasons.FITS, (1, 1)),
    ],
)
def test_what_demand_asks_for(
    pools: tuple[int, int], demand: tuple[float, float], reason: str, target: tuple[int, int]
) -> None:
    found = Plant(*pools).tick(demand, HOME)
    assert (found.reason, found.target) == (reason, target)
    assert found.message


def test_a_pool_with_spare_workers_shrinks_while_the_other_does_not() -> None:
    plant = Plant(2, 6)
    found = [plant.tick((1.4, 1.4), HOME) for _ in range(200)]
    assert plant.split == (2, 2)
    changes = [f for f in found if f.target != f.before]
    assert [(f.reason, f.before.total - f.target.total) for f in changes] == [(reasons.IDLE, 1)] * 4
    assert found[-1].reason == reasons.FITS


def test_both_go_their_ways() -> None:
    plant = Plant(2, 6)
    found = [plant.tick((3.0, 1.4), HOME) for _ in range(200)]
    assert plant.split == (4, 2)
    # The short one first, and nothing shrinks while it starts.
    assert found[0].target == (4, 6)
    assert found[1].reason == reasons.STARTING


FULL = Bounds(max_gpus=8)


@pytest.mark.parametrize(
    ("explained", "rest", "reason"),
    [(True, [(4, 3)], reasons.FITS), (False, [], reasons.UNEXPLAINED)],
)
def test_where_gpus_are_used_up_the_idle_pool_makes_room_for_the_short_one_and_nothing_flaps(
    explained: bool, rest: list[tuple[int, int]], reason: str
) -> None:
    """A shortage explains misses: they don't keep the GPUs it needs with the idle pool. Once it is over they do."""
    plant = Plant(2, 6)
    splits = [plant.split]
    for _ in range(400):
        found = plant.tick((3.4, 2.0), HOME, FULL, explained=explained)
        assert plant.held <= 8
        if found.target != splits[-1]:
            splits.append(found.target)
    assert splits == [(2, 6), (2, 5), (3, 5), (3, 4), (4, 4), *rest]
    assert found.reason == reason


def test_until_the_idle_pools_window_is_over_the_short_one_says_what_it_waits_for() -> None:
    found = Plant(2, 6).tick((3.4, 2.0), HOME, FULL)
    assert (found.reason, found.limited_by) == (reasons.AT_MOST, (reasons.LIMITED_BY_BUDGET,))
    assert "prefill needs 4 and has 2" in found.message
    assert "Stabilizing" in found.message
    paused = Plant(2, 6).tick((3.4, 2.0), HOME, FULL, pause="ScaleDown")
    assert paused.limited_by == (reasons.LIMITED_BY_BUDGET, reasons.LIMITED_BY_PAUSE)


@pytest.mark.parametrize(
    ("pools", "bounds", "demand", "target", "limits"),
    [
        ((2, 2), Bounds(prefill_max=2), (2.2, 1.5), (2, 2), (reasons.LIMITED_BY_BOUNDS,)),
        ((2, 2), Bounds(prefill_max=2), (3.0, 2.2), (2, 3), (reasons.LIMITED_BY_BOUNDS,)),
        ((2, 2), Bounds(max_gpus=5, prefill_gpus=2), (2.2, 1.5), (2, 2), (reasons.LIMITED_BY_BUDGET,)),
        ((2, 2), Bounds(max_gpus=7, prefill_gpus=2), (3.0, 2.0), (2, 3), (reasons.LIMITED_BY_BUDGET,)),
        # The other pool comes along where the ratio asks for it, and not for nothing.
        ((2, 2), ONE_TO_ONE, (2.2, 1.5), (3, 3), ()),
        ((2, 2), NO_MORE_PREFILL, (2.2, 1.5), (3, 3), ()),
        ((2, 3), NO_MORE_PREFILL, (2.2, 1.5), (3, 3), ()),
        ((2, 2), dataclasses.replace(NO_MORE_PREFILL, max_gpus=5), (2.2, 1.5), (2, 2), ("Ratio", "GPUs")),
        ((2, 2), dataclasses.replace(NO_MORE_PREFILL, decode_max=2), (2.2, 1.5), (2, 2), ("Ratio", "Bounds")),
        ((1, 3), Bounds(ratio_min=Ratio(1, 3), ratio_max=Ratio(1, 3)), (1.2, 1.5), (1, 3), ("RateLimit", "Ratio")),
    ],
)
def test_bounds_ratio_and_budget(
    pools: tuple[int, int],
    bounds: Bounds,
    demand: tuple[float, float],
    target: tuple[int, int],
    limits: tuple[str, ...],
) -> None:
    found = Plant(*pools).tick(demand, HOME, bounds)
    assert found.target == target
    assert set(found.limited_by) == {reasons.LIMITED_BY_BUDGET if limit == "GPUs" else limit for limit in limits}
    assert (found.reason == reasons.AT_MOST) == (target == pools)


def test_what_came_along_for_the_ratio_stays_also_half_way() -> None:
    slow = dataclasses.replace(HOME, up=Rules(0.0, rates=(Rate("Pods", 1, 600.0),)))
    plant = Plant(2, 2)
    splits = {plant.tick((2.2, 1.5), slow, NO_MORE_PREFILL).target for _ in range(300)}
    assert splits == {(2, 3), (3, 3)}
    assert plant.split == (3, 3)


def test_windows_are_each_pools_own() -> None:
    """A need of one pool that is over with the other's begun is no need that lasted."""
    slow = dataclasses.replace(HOME, up=Rules(30.0, rates=(Rate("Pods", 2, 60.0),)))
    plant = Plant()
    for i in range(40):
        assert plant.tick((2.2, 1.5) if i % 2 else (1.5, 2.2), slow).target == (2, 2)
    seen = [plant.tick((1.5, 2.2), slow).reason for _ in range(7)]
    assert seen[-1] == reasons.SHORT
    assert set(seen[:-1]) == {reasons.STABILIZING}


def test_one_pools_growth_does_not_reverse_the_others_shrinking() -> None:
    plant = Plant(2, 6)
    for _ in range(400):
        plant.tick((3.4, 2.0), HOME, FULL)
    assert plant.memory.pool_reversals == {}
    assert plant.memory.reversals == 0
    # A pool's own: its next window is doubled, the other's is not.
    plant = Plant(2, 2)
    plant.tick((2.2, 1.5), HOME)
    while plant.held > 4:
        plant.tick((1.0, 1.5), HOME)
    assert plant.memory.pool_reversals == {"prefill": 1}
    plant.memory = Memory.load(Memory(size=plant.memory).durable().dump()).size
    assert plant.memory.pool_reversals == {"prefill": 1}


def test_a_doubled_window_outlasts_the_other_pools_changes() -> None:
    """They are forgotten after half an hour, and a window may be longer than that."""
    growth = dataclasses.replace(HOME, down=dataclasses.replace(HOME.down, stabilization_seconds=600.0))
    plant = Plant(3, 3)
    plant.memory = SizeMemory(changes=[Sized(0.0, 1, (1, 0))], pool_reversals={"prefill": 3})
    demands = [(1.0, 2.5), (1.0, 3.0)]
    while plant.now < 3500.0:
        plant.tick(demands[int(plant.now / 1200) % 2], growth)
        assert plant.split.prefill == 3, plant.now


def test_a_pod_that_stays_pending_is_given_up_and_no_pool_grows_but_the_other_may_shrink() -> None:
    plant = Plant(2, 4, start=1e9)
    growth = dataclasses.replace(HOME, pending_seconds=100.0)
    found = [plant.tick((3.0, 1.4), growth) for _ in range(60)]
    undone = next(i for i, f in enumerate(found) if f.reason == reasons.PENDING_UNDONE)
    assert found[undone].target == (2, 4)
    assert plant.split == (2, 2)
    assert found[-1].reason == reasons.BACKING_OFF
    assert plant.memory.failures == 1


def test_memory_of_an_earlier_version_is_read_and_its_windows_start_again() -> None:
    old = Memory().dump()
    old["size"] = {"changes": [[1.0, 1]], "reversals": 2, "failures": 1, "blocked_until": 5.0, "since": 1.0}
    old["size"]["needs"] = [[at, 8, 8] for at in (1.0, 2.0)]
    memory = Memory.load(old).size
    assert (memory.reversals, memory.failures, memory.changes) == (2, 1, [Sized(1.0, 1)])
    plant = Plant(2, 2)
    plant.memory = memory
    assert plant.tick((1.5, 1.5), HOME).reason == reasons.FITS
    assert plant.memory.needs == [Need(5.0, 4, 6, (2, 3))]
    assert plant.memory.since == 5.0
    # With roles that may switch they go on.
    plant = Plant(2, 2)
    plant.memory = memory
    plant.tick((1.5, 1.5), QUICK)
    assert len(plant.memory.needs) == 3


LIMITS = st.builds(
    Bounds,
    prefill_max=st.integers(1, 9),
    decode_max=st.integers(1, 9),
    max_gpus=st.sampled_from([None, 4, 6, 9]),
    prefill_gpus=st.sampled_from([1, 2]),
    ratio_min=st.sampled_from([None, Ratio(1, 3), Ratio(1, 1)]),
    ratio_max=st.sampled_from([None, Ratio(1, 1), Ratio(2, 1)]),
)


def check_settled(
    prefill: float, decode: float, bounds: Bounds, start: float, stop: float, begins: tuple[int, int], rate: int
) -> None:
    growth = dataclasses.replace(HOME, up=Rules(0.0, rates=(Rate("Pods", rate, 60.0),)))
    plant = Plant(*begins, start=start, stop=stop)
    changes: list[Split] = []
    for _ in range(600):
        found = plant.tick((prefill, decode), growth, bounds)
        changes.append(Split(found.target.prefill - found.before.prefill, found.target.decode - found.before.decode))
    # No pool goes one way and then back.
    for pool in (0, 1):
        assert len({change[pool] > 0 for change in changes if change[pool]}) < 2, changes
    for _ in range(200):
        found = plant.tick((prefill, decode), growth, bounds)
        assert found.target == found.before
    memory = plant.memory.needs[-1]
    short = [p for p in plant.ready if memory.grow_of(p) > plant.ready[p]]
    spare = [p for p in plant.ready if memory.keep_of(p) < plant.ready[p]]
    if short:
        assert found.limited_by
    if spare:
        assert reasons.LIMITED_BY_RATIO in found.limited_by, "nothing but the ratio keeps an idle worker"


SETTLED = (
    st.floats(0, 7),
    st.floats(0, 7),
    LIMITS,
    st.sampled_from([5.0, 30.0, 120.0]),
    st.sampled_from([0.0, 20.0, 120.0]),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.integers(1, 3),
)

test_constant_demand_settles_without_flaps = settings(max_examples=200, deadline=None)(given(*SETTLED)(check_settled))
test_it_settles_for_long = pytest.mark.timeout(3600)(
    pytest.mark.soak(settings(max_examples=10_000, deadline=None)(given(*SETTLED)(check_settled)))
)


def test_loans_from_before_roles_were_fixed_do_not_count() -> None:
    plant = Plant(2, 6)
    found, _ = sized(plant.fleets(), (2.2, 1.5), Split(4, 4), Bounds(), HOME, "None", True, plant.memory, 5.0)
    assert (found.reason, found.target) == (reasons.SHORT, (3, 6))
