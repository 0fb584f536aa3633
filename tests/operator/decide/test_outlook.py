"""A slow gear's look ahead: regimes, what comes back after them, and what has to be lost before a risk is taken."""

from __future__ import annotations

import importlib

import pytest

from forebay_operator.decide import Decision, Gear, Memory, Policy, Split, decide, reasons
from forebay_operator.decide.fluid import Course, Load, Model, model_of, roll, slowed
from forebay_operator.decide.memory import Before, Queues, Track, Traffic
from forebay_operator.decide.outlook import Outlook, outlook
from forebay_operator.decide.regime import dwell, follow, regret
from forebay_operator.decide.types import Option
from forebay_operator.decide.value import Valued
from support.observations import WORKERS, Source, policy

SLOW = policy(gear=Gear(120.0, drains=True))
SPLITS = [Split(p, 8 - p) for p in range(1, 8)]
FOUR, TWO = {2: 0.5, 4: 0.0}, {2: 0.0, 4: 0.5}
"""Misses per split, by prefill workers: traffic for 4:4, and for 2:6."""


def seen(memory: Memory, costs: dict[int, float], begin: int, end: int, least: float = 120.0) -> None:
    for now in range(begin, end, 5):
        follow(memory, costs, float(now), least)


# Regimes.


def test_what_is_over_before_a_move_could_have_been_is_no_regime() -> None:
    memory = Memory()
    seen(memory, FOUR, 0, 600)
    seen(memory, TWO, 600, 715)
    assert memory.pending is not None
    seen(memory, FOUR, 715, 1000)
    assert (memory.regime, memory.regime_since) == (4, 0.0)
    assert memory.before is None
    assert memory.runs == [115.0], "what came and went is what the next that comes may be"


def test_a_regime_counts_from_when_it_began_and_remembers_what_was_before() -> None:
    memory = Memory(traffic=Traffic(100.0, 6000.0), tracks={"4": Track(missed=1, offered=10)})
    seen(memory, FOUR, 0, 600)
    seen(memory, TWO, 600, 605)
    memory.traffic, memory.tracks = Traffic(200.0, 900.0), {"4": Track(missed=5, offered=10)}
    memory.pending_rivals = {"4": Track(missed=3)}
    seen(memory, TWO, 605, 725)
    assert (memory.regime, memory.regime_since, memory.runs) == (2, 600.0, [600.0])
    assert memory.before == Before(Traffic(100.0, 6000.0), {"4": 0.1})
    assert memory.rivals == {"4": Track(missed=3)}, "misses count from the regime's start"


def test_a_memory_with_a_regime_about_to_be_certain_survives_a_restart() -> None:
    memory = Memory()
    seen(memory, FOUR, 0, 100)
    seen(memory, TWO, 100, 150)
    assert memory.pending is not None
    assert Memory.load(memory.dump()) == memory


@pytest.mark.parametrize(
    ("runs", "age", "seconds"),
    [
        ([], 0, 60),
        ([], 600, 660),
        ([300.0, 300.0], 0, (300 + 300 + 60) / 3),
        ([300.0, 300.0], 240, (60 + 60 + 300) / 3),
        # No run lasted as long as this one: it goes on for as long again.
        ([300.0, 300.0], 900, 960),
    ],
)
def test_dwell_is_learnt_from_the_runs_that_lasted_longer(runs: list[float], age: float, seconds: float) -> None:
    assert dwell(Memory(regime=4, regime_since=0.0, runs=runs), age) == pytest.approx(seconds)


def test_regret_is_of_the_present_regime_only() -> None:
    memory = Memory(rivals={"real": Track(missed=100.0), "2": Track(missed=30.0)})
    assert regret(memory, 2) == 70
    assert regret(memory, 3) == 0, "of a split that was not followed nothing is known"
    memory.pending = Before(Traffic(), {})
    memory.pending_rivals = {"real": Track(missed=10.0), "2": Track(missed=5.0)}
    assert regret(memory, 2) == 5


# The look ahead.


def steady(rate: float, prompt: float, output: float) -> tuple[Load, Model]:
    work = rate * prompt / WORKERS.prefill_velocity
    load = Load([work] * 60, [rate] * 60, output, prompt + output / 2, work / rate)
    return load, model_of(load, WORKERS, 1.0, 1.0, 0.04, False, WORKERS.prefill_velocity)


def ahead(stay: float, before: Before, law: Policy = SLOW) -> Outlook:
    load, model = steady(14, 2100, 1100)
    memory = Memory(before=before)
    found = outlook(stay, 200.0, load, model, WORKERS.prefill_velocity, SPLITS, Split(4, 4), law, memory)
    assert found is not None
    return found


def chat(rate: float, shares: dict[str, float]) -> Before:
    """An hour's mean of short answers."""
    return Before(Traffic(1800.0, rate * 1800, rate * 1800 * 1150, rate * 1800 * 200, rate * 1800 * 1250), shares)


def cost(found: Outlook, split: Split, queues: Queues | None = None) -> float:
    load, model = steady(14, 2100, 1100)
    return found.cost(split, load, model, Course(split, split, 0.0), queues or Queues(), 1.0)


def test_what_comes_back_counts_by_its_requests() -> None:
    """2:6 would miss all of the old traffic: of four times as many requests that is four times as bad."""
    few, many = ahead(600.0, chat(15, {"2": 1.0})), ahead(600.0, chat(60, {"2": 1.0}))
    assert few.risk(Split(2, 6), Split(4, 4)) == pytest.approx(15 * 200)
    assert many.risk(Split(2, 6), Split(4, 4)) == pytest.approx(60 * 200)
    assert many.risk(Split(4, 4), Split(2, 6)) == 0
    assert cost(many, Split(2, 6)) > cost(few, Split(2, 6)) > cost(ahead(600.0, chat(15, {})), Split(2, 6))


def test_the_longer_a_regime_lasts_the_less_its_end_counts() -> None:
    costs = [cost(ahead(stay, chat(60, {"2": 1.0})), Split(2, 6)) for stay in (60.0, 300.0, 1200.0, 9000.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] == costs[3], "beyond twenty minutes nothing changes"


def test_queues_that_a_regime_leaves_are_charged_at_the_rate_of_the_next() -> None:
    """What waits for decoders when chat comes back makes chat wait, however few requests it is."""
    found = ahead(300.0, chat(60, {}))
    idle, full = (found._left_over(Split(4, 4), Queues(0.0, decoding)) for decoding in (100.0, 2000.0))
    assert idle == 0
    assert full > 60 * 30
    assert found._left_over(Split(2, 6), Queues(0.0, 2000.0)) > 0
    quiet = ahead(300.0, chat(6, {}))
    assert quiet._left_over(Split(4, 4), Queues(0.0, 2000.0)) < full / 5


def test_a_first_regime_expects_more_of_the_same() -> None:
    load, model = steady(14, 2100, 1100)
    traffic = Traffic(60.0, 840.0, 840 * 2100, 840 * 1100, 840 * 2650)
    memory = Memory(traffic=traffic, tracks={"4": Track(missed=84, offered=840)})
    args = (load, model, WORKERS.prefill_velocity, SPLITS, Split(4, 4), SLOW)
    found = outlook(60.0, 200.0, *args, memory)
    assert found is not None
    assert (found.back_rate, found.shares, found.heavier, found.longer) == (14, {"4": 0.1}, 1, 1)
    assert outlook(60.0, 200.0, *args, Memory()) is None, "nothing was seen yet"


def test_slower_prompts_are_as_many_requests() -> None:
    """A donor of prefill workers is taken as slower: decoders see no more requests for that."""
    load, model = steady(30, 1000, 200)
    course = Course(Split(4, 4), Split(4, 4), 0.0)
    usual, slower = (roll(each, model, course, Queues(), 300.0) for each in (load, slowed(load, 1.25)))
    assert sum(slowed(load, 1.25).prefill_seconds) == pytest.approx(1.25 * sum(load.prefill_seconds))
    assert slower[1] == usual[1]
    assert slower[2].decoding == pytest.approx(usual[2].decoding)


# Decisions.


def shortage(source: Source, law: Policy, memory: Memory, ticks: int) -> tuple[list[Decision], Memory]:
    """160 prompts a second: five workers' worth and a third, on four, so that their queue grows all the time."""
    source.rate = 160
    decisions = []
    for _ in range(ticks):
        source.queued = max(0, source.queued + 5 * (160_000 - 30_000 * source.prefill))
        decision, memory = decide(source.tick(), law, memory, source.at)
        source.move(decision.target.prefill)
        decisions.append(decision)
    return decisions, memory


def settled(law: Policy) -> tuple[Source, Memory]:
    source, memory = Source(), Memory()
    for _ in range(100):
        _, memory = decide(source.tick(), law, memory, source.at)
    return source, memory


@pytest.mark.parametrize("caught", [0.0, 1.0])
def test_a_risk_is_taken_when_staying_has_lost_as_much(caught: float) -> None:
    """Splits with more prefill workers would have missed `caught` of the traffic before, 600 requests a second."""
    source, memory = settled(SLOW)
    _, memory = shortage(source, SLOW, memory, 3)
    before = Before(
        Traffic(1800.0, 600 * 1800, 600 * 1800 * 100, 600 * 1800 * 20, 600 * 1800 * 110),
        {str(p): 1.0 if p < 3 else caught if p > 4 else 0.0 for p in range(1, 8)},
    )
    memory.before, memory.regime, memory.regime_since = before, 5, source.at
    memory.pending, memory.regime_worse_at, memory.rivals = None, -1.0, {}
    memory.runs = [36_000.0] * 8
    decisions, memory = shortage(source, SLOW, memory, 12)
    moved = [d for d in decisions if d.moves]
    assert bool(moved) == (caught == 0)
    if not moved:
        (held,) = [d for d in decisions if d.reason == reasons.SHORT_REGIME][-1:]
        assert "changes back before the move has paid" in held.message
        # An hour later the same shortage has cost more than being caught would.
        real = memory.rivals["real"]
        memory.rivals["real"] = Track(real.queues, real.missed + 600 * 400, real.offered)
        decisions, _ = shortage(source, SLOW, memory, 12)
        assert any(d.moves for d in decisions)


def test_a_slow_gear_goes_as_far_as_all_observations_asked_for() -> None:
    """And not before one that shares no arrival with the first has asked for it too."""
    source, memory = settled(SLOW)
    decisions, memory = shortage(source, SLOW, memory, 30)
    moved = next(i for i, d in enumerate(decisions) if d.moves)
    asked = [d for d in decisions[:moved] if d.reason == reasons.CONFIRMING]
    assert len(asked) >= 4
    assert decisions[moved].moves <= min(abs(d.options[0].split.prefill - 4) for d in asked[-4:])


@pytest.mark.parametrize(("without", "after"), [(None, 25), (14, 40)])
def test_looks_between_ticks_count_neither_way(
    without: int | None, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called each second, the law confirms by the looks that a replay has. One without a gain begins anew."""
    source, memory = settled(SLOW)
    began = source.at
    law = importlib.import_module("forebay_operator.decide.decide")
    for second in range(60):
        gain = 0.1 if second % 5 == 4 and second != without else -0.1
        options = sorted([Option(Split(4, 4), 0.5, 0.0), Option(Split(5, 3), 0.4, gain)], key=lambda o: -o.gain)
        found = Valued(tuple(options), 0.02, 600.0, 0.0, 0.02)
        monkeypatch.setattr(law, "valued", lambda *_, found=found: found)
        decision, memory = decide(source.tick(1.0), SLOW, memory, source.at)
        if decision.moves:
            break
    assert source.at - began == after
    assert decision.target == Split(5, 3)
