"""Growing and shrinking the number of workers: each rule by a table, and what must hold whatever happens.

Pools that serve at home only have their tables in test_size_homes.py, and the properties here.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api.ratio import Ratio
from forebay_operator.decide import Bounds, Rate, Rules, reasons
from support.plant import QUICK, Plant


@pytest.mark.parametrize(
    ("demand", "reason", "target"),
    [
        ((1.5, 1.5), reasons.FITS, (2, 2)),
        ((1.7, 1.7), reasons.FITS, (2, 2)),  # 1.7 / 0.8 = 2.1: within the tolerance
        ((2.2, 1.5), reasons.SHORT, (3, 2)),
        ((1.5, 3.4), reasons.SHORT, (2, 4)),
        ((3.0, 3.0), reasons.SHORT, (3, 3)),  # two of three: the rate
        ((1.0, 1.0), reasons.FITS, (2, 2)),  # one less would be 2 for 2.5 with the margin
        ((0.5, 1.0), reasons.STABILIZING, (2, 2)),
        ((0.0, 0.0), reasons.STABILIZING, (2, 2)),
    ],
)
def test_what_demand_asks_for(demand: tuple[float, float], reason: str, target: tuple[int, int]) -> None:
    found = Plant().tick(demand)
    assert (found.reason, found.target) == (reason, target)
    assert found.message


def test_the_rate_limits_and_says_so() -> None:
    found = Plant().tick((6.0, 6.0))
    assert found.target.total == 6
    assert found.limited_by == (reasons.LIMITED_BY_RATE,)
    plant = Plant()
    plant.tick((6.0, 6.0))
    assert plant.tick((6.0, 6.0)).target.total == 6
    percent = dataclasses.replace(QUICK, up=Rules(0.0, "Min", (Rate("Percent", 25, 60.0), Rate("Pods", 4, 60.0))))
    assert Plant(4, 4).tick((9.0, 9.0), percent).target.total == 10
    most = dataclasses.replace(percent, up=dataclasses.replace(percent.up, select="Max"))
    assert Plant(4, 4).tick((9.0, 9.0), most).target.total == 12
    never = dataclasses.replace(QUICK, up=dataclasses.replace(QUICK.up, select="Disabled"))
    assert Plant().tick((9.0, 9.0), never).reason == reasons.AT_MOST


def test_growth_waits_for_its_window() -> None:
    slow = dataclasses.replace(QUICK, up=Rules(30.0, rates=(Rate("Pods", 2, 60.0),)))
    plant = Plant()
    seen = [plant.tick((3.0, 1.0), slow).reason for _ in range(8)]
    assert seen == [reasons.STABILIZING] * 6 + [reasons.SHORT] + [seen[-1]]
    # The least need within the window counts: a burst asks for nothing.
    plant = Plant()
    for i in range(20):
        assert plant.tick((3.0 if i % 5 else 1.5, 1.5), slow).target.total == 4


def test_shrinking_takes_one_at_a_time_from_one_pool_and_waits_for_its_end() -> None:
    plant = Plant(3, 4)
    found = [plant.tick((0.5, 0.5)) for _ in range(60)]
    changes = [f for f in found if f.target != f.before]
    assert all(f.reason == reasons.IDLE and f.before.total - f.target.total == 1 for f in changes)
    assert plant.ready == {"prefill": 1, "decode": 1}
    assert {reasons.TERMINATING, reasons.STABILIZING} <= {f.reason for f in found}


def test_nothing_shrinks_on_misses_that_demand_does_not_explain() -> None:
    plant = Plant(3, 4)
    assert {plant.tick((0.5, 0.5), explained=False).reason for _ in range(30)} == {reasons.UNEXPLAINED}


@pytest.mark.parametrize(
    ("bounds", "demand", "target", "limits"),
    [
        (Bounds(prefill_max=2), (2.2, 1.5), (2, 3), ()),  # the other pool gives the worker: roles may switch
        (Bounds(prefill_max=2, decode_max=2), (3.0, 1.5), (2, 2), (reasons.LIMITED_BY_BOUNDS,)),
        (Bounds(max_gpus=4), (3.0, 1.5), (2, 2), (reasons.LIMITED_BY_BUDGET,)),
        (Bounds(max_gpus=7, prefill_gpus=2), (2.2, 1.5), (2, 3), ()),
        (Bounds(ratio_min=Ratio(1, 1), ratio_max=Ratio(1, 1)), (2.2, 1.5), (2, 2), (reasons.LIMITED_BY_RATIO,)),
    ],
)
def test_bounds_ratio_and_budget(
    bounds: Bounds, demand: tuple[float, float], target: tuple[int, int], limits: tuple[str, ...]
) -> None:
    found = Plant().tick(demand, bounds=bounds)
    assert found.target == target
    assert found.limited_by == limits
    assert (found.reason == reasons.AT_MOST) == (target == (2, 2))


def test_terminating_pods_hold_their_gpus() -> None:
    plant = Plant()
    plant.leaving["decode"] = [0.0]
    assert plant.tick((3.0, 1.5), bounds=Bounds(max_gpus=5)).reason == reasons.AT_MOST
    plant.leaving["decode"] = []
    assert plant.tick((3.0, 1.5), bounds=Bounds(max_gpus=5)).reason == reasons.SHORT


def test_a_pod_that_stays_pending_is_given_up_and_growth_backs_off() -> None:
    plant = Plant(start=1e9)
    growth = dataclasses.replace(QUICK, pending_seconds=100.0)
    found = [plant.tick((3.0, 3.0), growth) for _ in range(60)]
    undone = [f for f in found if f.reason == reasons.PENDING_UNDONE]
    assert undone[0].target == (2, 2)
    assert "Pending for 100 s" in undone[0].message
    after = found[found.index(undone[0]) + 1 :]
    assert {f.reason for f in after[:30]} == {reasons.BACKING_OFF}
    assert plant.memory.failures == 1
    # It is tried again, and waits twice as long after the next failure.
    for _ in range(60):
        plant.tick((3.0, 3.0), growth)
    assert plant.memory.failures == 2
    assert plant.memory.blocked_until - plant.now > 300


def test_reversals_double_the_window() -> None:
    plant = Plant()
    lengths = []
    for _ in range(4):
        plant.tick((2.2, 1.5))
        began = plant.now
        while plant.tick((0.5, 1.0)).target.total != 4:
            assert plant.now - began < 2000
        lengths.append(plant.now - began)
        while plant.held > 4:
            plant.tick((1.5, 1.5))
    assert lengths[-1] > 2 * lengths[0]
    assert plant.memory.reversals == 3


@pytest.mark.parametrize(
    ("pause", "demand"), [("All", (3.0, 3.0)), ("ScaleUp", (3.0, 3.0)), ("All", (0.1, 0.1)), ("ScaleDown", (0.1, 0.1))]
)
def test_pauses(pause: str, demand: tuple[float, float]) -> None:
    found = [Plant().tick(demand, pause=pause) for _ in range(9)]
    assert {(f.reason, f.limited_by) for f in found} == {(reasons.PAUSED, (reasons.LIMITED_BY_PAUSE,))}


def test_after_a_restart_or_a_gap_the_windows_fill_again() -> None:
    plant = Plant(3, 3)
    for _ in range(4):
        plant.tick((0.5, 0.5))
    plant.memory = plant.memory.durable()
    assert [plant.tick((0.5, 0.5)).reason for _ in range(4)] == [reasons.STABILIZING] * 4
    assert plant.tick((0.5, 0.5)).reason == reasons.IDLE
    plant = Plant(3, 3)
    plant.tick((0.5, 0.5))
    assert plant.tick((0.5, 0.5), seconds=300.0).reason == reasons.STABILIZING


DEMANDS = st.tuples(st.floats(0, 12), st.floats(0, 12), st.integers(1, 25))


def check_invariants(
    demands: list[tuple[float, float, int]],
    bounds: Bounds,
    start: float,
    stop: float,
    restart: int,
    homes_serve: bool,
) -> None:
    plant = Plant(start=start, stop=stop)
    growth = dataclasses.replace(QUICK, pending_seconds=100.0, homes_serve=homes_serve)
    most = bounds.max_gpus or 10**9
    changes: list[tuple[float, int]] = []
    step = 0
    for prefill, decode, ticks in demands:
        for _ in range(ticks):
            step += 1
            if step == restart:
                plant.memory = plant.memory.durable()
            held = plant.held
            found = plant.tick((prefill, decode), growth, bounds)
            change = found.target.total - found.before.total
            assert found.reason
            assert found.message
            assert found.target.prefill >= bounds.prefill_min
            assert found.target.decode >= bounds.decode_min
            assert found.target.prefill <= max(bounds.prefill_max, found.before.prefill)
            assert found.target.decode <= max(bounds.decode_max, found.before.decode)
            # GPUs, those of pods that are leaving included, are never over the budget because of a decision.
            assert plant.held <= max(most, held)
            if change < 0 and found.reason != reasons.PENDING_UNDONE:
                # One pool, one worker, and none while another leaves.
                assert change == -1
                assert plant.seen_leaving == 0
                changes.append((plant.now, change))
            if change > 0:
                changes.append((plant.now, change))
            assert sum(n for at, n in changes if n > 0 and at > plant.now - 60.0) <= 2
            assert sum(-n for at, n in changes if n < 0 and at > plant.now - 60.0) <= 1


CASES = (
    st.lists(DEMANDS, min_size=1, max_size=5),
    st.builds(
        Bounds,
        prefill_min=st.just(1),
        prefill_max=st.integers(2, 8),
        decode_min=st.just(1),
        decode_max=st.integers(2, 8),
        max_gpus=st.sampled_from([None, 4, 6, 9]),
    ),
    st.sampled_from([5.0, 30.0, 1e9]),
    st.sampled_from([0.0, 20.0, 120.0]),
    st.integers(0, 40),
    st.booleans(),
)

test_limits_hold_whatever_the_demand = settings(max_examples=300, deadline=None)(given(*CASES)(check_invariants))
test_limits_hold_for_long = pytest.mark.timeout(3600)(
    pytest.mark.soak(settings(max_examples=20_000, deadline=None)(given(*CASES)(check_invariants)))
)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0, 6),
    st.floats(0, 6),
    st.sampled_from([5.0, 30.0, 120.0]),
    st.sampled_from([0.0, 20.0, 120.0]),
    st.booleans(),
)
def test_constant_demand_settles(prefill: float, decode: float, start: float, stop: float, homes_serve: bool) -> None:
    plant = Plant(start=start, stop=stop)
    growth = dataclasses.replace(QUICK, homes_serve=homes_serve)
    for _ in range(300):
        plant.tick((prefill, decode), growth)
    assert {plant.tick((prefill, decode), growth).target.total for _ in range(200)} == {plant.held}


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 8), st.floats(0, 8), st.floats(0, 4), st.floats(0, 4), st.booleans())
def test_more_demand_never_asks_for_fewer(
    prefill: float, decode: float, more: float, even: float, homes_serve: bool
) -> None:
    growth = dataclasses.replace(QUICK, homes_serve=homes_serve)
    usual = Plant(3, 3).tick((prefill, decode), growth)
    raised = Plant(3, 3).tick((prefill + more, decode + even), growth)
    assert raised.target.total >= usual.target.total
