"""The oracle: never below the schedules that it begins with, within its number of replays."""

from __future__ import annotations

from functools import partial

import pytest

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, Decide, Outcome, Setup
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.fleet import Gear, replica_gear, role_gear
from forebay_operator.replay.oracle import KNOT_SECONDS, Oracle, Scheduled, minutes_missed
from forebay_operator.replay.policies import LAWS
from forebay_operator.replay.run import ORACLE_LAWS, plant_of, run
from forebay_operator.replay.trace import Trace
from support.replay import poisson, setup


def shifting(seed: int, parts: int = 2, seconds: float = 90.0) -> Trace:
    """Long prompts and long answers in turn; parts end between knots."""
    trace: Trace = []
    for part in range(parts):
        rate, prompt, output = ((13.0, 5000, 10), (25.0, 300, 900))[(seed + part) % 2]
        trace += poisson(rate, seconds, prompt, output, seed=10 * seed + part, start=part * seconds)
    return trace


def played(trace: Trace, made: Setup, law: Decide) -> tuple[int, Outcome]:
    outcome = Cluster(made, FastWorker).run(trace, law)
    return sum(minutes_missed(outcome, made)), outcome


def at_knots(outcome: Outcome, made: Setup) -> list[int]:
    """What the law wanted when each minute began."""
    targets = {0.0: made.start_prefill} | {at - made.tick_seconds: target for at, _, _, target in outcome.splits}
    last = max(targets)
    return [targets[minute * KNOT_SECONDS] for minute in range(int(last // KNOT_SECONDS) + 1)]


@pytest.mark.parametrize(
    ("seed", "gear", "convertible"),
    [(1, role_gear(), False), (2, role_gear(), False), (1, role_gear(), True), (1, replica_gear(20), False)],
)
def test_it_is_no_worse_than_what_it_begins_with(seed: int, gear: Gear, convertible: bool) -> None:
    trace, made = shifting(seed, seconds=65.0), setup(4, 2, gear, convertible=convertible)
    plant = plant_of(made)
    laws = {name: partial(LAWS[name], plant) for name in ORACLE_LAWS}
    found = Oracle(trace, made, FastWorker, laws=laws, plans=1, changes=2).search()
    assert found.replays <= (made.workers - 1) + 3 * len(laws) + 1 + 1 + 2
    started = setup(4, found.schedule[0], gear, convertible=convertible)
    assert played(trace, started, Scheduled(found.schedule, found.seconds))[0] == found.missed
    for prefill in range(1, made.workers):
        fixed = setup(4, prefill, gear, convertible=convertible)
        assert found.missed <= played(trace, fixed, Scheduled([prefill]))[0]
    for make in laws.values():
        missed, outcome = played(trace, made, make())
        assert found.missed <= missed
        assert found.missed <= played(trace, made, Scheduled(at_knots(outcome, made)))[0]


def test_changes_mend_what_the_plan_left() -> None:
    trace, made = shifting(1), setup(4, 2)
    planned, changed = (Oracle(trace, made, FastWorker, plans=0, changes=n).search() for n in (0, 8))
    assert changed.missed < 0.6 * planned.missed
    assert changed.replays <= planned.replays + 8


def test_it_takes_a_run_whose_moves_lie_between_knots() -> None:
    """A law that knows when the traffic changes is followed tick by tick."""
    trace, made = shifting(2), setup(4, 3)

    def knows(observation: Observation, now: float) -> int:
        return 3 if now < 90.0 else 2

    alone = Oracle(trace, made, FastWorker, plans=0, changes=0).search()
    found = Oracle(trace, made, FastWorker, laws={"knows": lambda: knows}, plans=0, changes=0).search()
    assert found.missed < alone.missed
    assert (found.seconds, alone.seconds) == (made.tick_seconds, KNOT_SECONDS)
    assert found.schedule[:18] == [3] * 18
    assert set(found.schedule[18:]) == {2}


def test_known_fixed_splits_are_not_replayed_again() -> None:
    trace, made = shifting(1, seconds=40.0), setup(4, 2)
    known = {p: minutes_missed(run(trace, made, f"fixed:{p}:{4 - p}").outcome, made) for p in (1, 2, 3)}
    again = Oracle(trace, made, FastWorker, plans=0, changes=0, fixed_missed=known).search()
    anew = Oracle(trace, made, FastWorker, plans=0, changes=0).search()
    assert (again.schedule, again.missed, again.replays) == (anew.schedule, anew.missed, anew.replays - 3)


def test_the_oracle_beats_every_fixed_split_on_a_shift() -> None:
    made = setup(4, 2)
    prefill_heavy = poisson(14.0, 90.0, 5000, 10, seed=1)
    decode_heavy = poisson(25.0, 90.0, 300, 900, seed=2, start=90.0)
    trace = [*prefill_heavy, *decode_heavy]
    found = Oracle(trace, made, FastWorker, plans=0, changes=0).search()
    fixed = [run(trace, made, f"fixed:{p}:{4 - p}").score.attainment_percent for p in (1, 2, 3)]
    missed = 100 * found.missed / len(trace)
    assert 100 - missed > max(fixed) + 5
    assert len(set(found.schedule)) > 1
