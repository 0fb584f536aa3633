"""The role gear's look ahead: what waiting for a move costs, by hand and through the chain of rules."""

from __future__ import annotations

import dataclasses

import pytest

from forebay_operator.decide import Gear, Memory, fluid, reasons
from forebay_operator.decide.fluid import Course, Load
from forebay_operator.decide.memory import Queues
from forebay_operator.decide.minute import NOTHING, Minute, Move
from forebay_operator.decide.types import Split
from support.observations import WORKERS, Source, follow, policy

VELOCITY = WORKERS.prefill_velocity
HERE, THERE = Split(3, 3), Split(2, 4)


def load(rate: float, prompt: int, output: int) -> Load:
    work = rate * prompt / VELOCITY
    return Load([work] * 10, [rate] * 10, output, prompt + output / 2, prompt / VELOCITY)


def minute(of: Load, queues: Queues) -> Minute:
    model = fluid.model_of(of, WORKERS, 1.0, 1.0, 0.04, False, VELOCITY)
    return Minute(60.0, 21.0, float("inf"), HERE, model, queues)


def move(of: Load, to: Split) -> Move:
    during = Split(min(to.prefill, HERE.prefill), min(to.decode, HERE.decode))
    return Move(to, Course(during, to, 1.0), of, 1.0)


def decoding(of: Load, share: float) -> float:
    """So many requests that the three decoders are full by this share."""
    most = fluid.model_of(of, WORKERS, 1.0, 1.0, 0.04, False, VELOCITY).most
    return share * most * HERE.decode


@pytest.mark.parametrize(("full", "waits"), [(0.2, True), (0.6, True), (1.0, False), (1.3, False)])
def test_decoders_that_would_be_full_in_half_a_minute_can_wait(full: float, waits: bool) -> None:
    """At this load three decoders overflow, and four do not. Whether now is the time is what they hold already."""
    heavy = load(14.0, 2500, 1200)
    seen = minute(heavy, Queues(0.0, decoding(heavy, full)))
    stay = seen.cost(Move(HERE, Course(HERE, HERE, 0.0), heavy, 1.0))
    assert stay - seen.cost(move(heavy, THERE)) > 0.1
    assert (seen.waiting(move(heavy, THERE)) <= NOTHING) is waits


def test_prompts_that_miss_now_do_not_wait() -> None:
    """Four workers' worth of prompts for three, and two seconds of them in line: each second of waiting is missed."""
    prompts = load(60.0, 2000, 20)
    seen = minute(prompts, Queues(6.0, 10.0))
    assert seen.waiting(move(prompts, Split(5, 1))) > 0.5


def test_waiting_costs_what_the_misses_meanwhile_are() -> None:
    """Everything misses here and nothing there, at once: then ten seconds of waiting cost every request of them."""
    prompts = load(100.0, 1000, 5)
    later = Course(Split(3, 3), Split(5, 1), 10.0)
    model = minute(prompts, Queues()).model
    missed, offered, _ = fluid.roll(prompts, model, later, Queues(20.0, 0.0), 10.0, along=True)
    assert missed == pytest.approx(offered)
    seen = minute(prompts, Queues(20.0, 0.0))
    assert seen.waiting(move(prompts, Split(5, 1))) >= 1.0


def test_decoders_that_go_take_their_requests_along() -> None:
    """Half of them go at the switch and half of what runs with them; earlier requests too."""
    quiet = load(0.0, 1000, 10_000)
    quiet = dataclasses.replace(quiet, mean_prefill=1000 / VELOCITY)
    model = dataclasses.replace(minute(quiet, Queues()).model, earlier_weight=2.0, earlier_left=10_000.0)
    course = Course(Split(2, 4), Split(4, 2), 1.0)
    start = Queues(0.0, 40.0, 10.0)
    _, _, kept = fluid.roll(quiet, model, course, start, 3.0)
    _, _, left = fluid.roll(quiet, model, course, start, 3.0, along=True)
    # 30 new and 10 earlier ones that weigh 2: 50, and what a few hundred steps of 10,000 end of them.
    assert kept.decoding == pytest.approx(50, rel=0.05)
    assert left.decoding == pytest.approx(25, rel=0.05)


def test_a_split_that_can_wait_is_not_moved_to_and_says_so() -> None:
    """Decoders 80 % full, and the model has them overflow within the minute: reality says otherwise for ever here."""
    source = Source(prefill=3, decode=3, rate=28, prompt=2252, output=906)
    decisions, _ = follow(source, policy(), Memory(), 160)
    assert not [d for d in decisions if d.moves]
    last = decisions[-1]
    assert last.reason == reasons.CAN_WAIT
    assert last.options[0].split == Split(2, 4)
    assert last.options[0].gain > last.inputs["bar"]
    assert "2:4 would gain" in last.message
    assert "10 s more cost nothing" in last.message


def test_it_moves_once_waiting_would_cost_something() -> None:
    source = Source(prefill=3, decode=3, rate=29, prompt=2252, output=906)
    decisions, _ = follow(source, policy(), Memory(), 160)
    assert [(d.reason, str(d.target)) for d in decisions if d.moves] == [(reasons.BETTER_SPLIT, "2:4")]


@pytest.mark.parametrize(("share", "waits"), [(0.19, True), (0.21, False)])
def test_nothing_waits_while_a_fifth_misses(share: float, waits: bool) -> None:
    """The forecast that nothing is lost by waiting is wrong then."""
    source = Source(prefill=3, decode=3, rate=28, prompt=2252, output=906)
    _, memory = follow(source, policy(), Memory(), 40)
    target = ""
    for _ in range(8):
        source.missed += round(share * source.rate * 5)
        (decision,), memory = follow(source, policy(), memory, 1)
        target = target or (str(decision.target) if decision.moves else "")
    assert target == ("" if waits else "2:4")


def test_slow_gears_wait_for_nothing() -> None:
    """What a slow move is for has to be begun before it is needed."""
    source = Source(prefill=3, decode=3, rate=28, prompt=2252, output=906)
    decisions, _ = follow(source, policy(gear=Gear(30.0, drains=True)), Memory(), 60)
    assert reasons.CAN_WAIT not in {d.reason for d in decisions}


def test_load_near_a_pool_s_limit_moves_nothing_after_minutes() -> None:
    """The model takes five minutes to fill two decoders that really are as full as they were."""
    source = Source(prefill=2, decode=2, rate=27, prompt=850, output=850)
    decisions, memory = follow(source, policy(), Memory(), 160)
    assert not [d for d in decisions if d.moves]
    assert memory.tracks["2"].queues.decoding <= 27 * 850 * 0.015 + 1
    assert memory.tracks["2"].share == 0.0
