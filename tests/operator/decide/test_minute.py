"""The role gear's look ahead: what waiting for a move costs, by hand and through the chain of rules."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest

from forebay_operator.decide import Gear, Memory, fluid, reasons, value
from forebay_operator.decide.fluid import Course, Load
from forebay_operator.decide.memory import Queues
from forebay_operator.decide.minute import NOTHING, Minute, Move
from forebay_operator.decide.types import Split
from forebay_operator.observe.traffic import Observation
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
    return Move(Course(during, to, 1.0), of, 1.0)


def decoding(of: Load, share: float) -> float:
    """So many requests that the three decoders are full by this share."""
    most = fluid.model_of(of, WORKERS, 1.0, 1.0, 0.04, False, VELOCITY).most
    return share * most * HERE.decode


@pytest.mark.parametrize(("full", "waits"), [(0.2, True), (0.6, True), (1.0, False), (1.3, False)])
def test_decoders_that_would_be_full_in_half_a_minute_can_wait(full: float, waits: bool) -> None:
    """At this load three decoders overflow, and four do not. Whether now is the time is what they hold already."""
    heavy = load(14.0, 2500, 1200)
    seen = minute(heavy, Queues(0.0, decoding(heavy, full)))
    stay = seen.cost(Move(Course(HERE, HERE, 0.0), heavy, 1.0))
    assert stay - seen.cost(move(heavy, THERE)) > 0.1
    assert (seen.waiting(move(heavy, THERE)) <= NOTHING) is waits


def charged(of: Load, full: float, over_capacity: float, mixed: float = 0.0, tpot: float = 0.04) -> float:
    """Seconds' worth of arrivals that miss after the look ahead, where decoders are `full` and get this many times the
    requests that they end."""
    made = dataclasses.replace(minute(of, Queues()).model, mixed=mixed, tpot=tpot)
    ended = made.most * HERE.decode / (of.output * made.step(made.most))
    of = dataclasses.replace(of, requests=[over_capacity * ended] * 10, prefill_seconds=[0.0] * 10)
    queues = Queues(0.0, full * made.most * HERE.decode)
    args = (of, made, Course(HERE, HERE, 0.0), queues, 1.0)
    with_end, offered, _ = fluid.roll(*args, horizon=21.0, bear=True)
    without, _, _ = fluid.roll(*args)
    return (with_end - without) / offered


def test_answers_that_wait_a_little_miss_nothing() -> None:
    """Full decoders take 28 ms a token, 34 ms may pass: a fifth more than fit are borne, and half more are not.

    Load that is 2 % too much fills that fifth in minutes, and a law that looks each 5 s is elsewhere by then.
    """
    long = load(12.0, 4000, 1200)
    assert charged(long, 1.1, 0.9) == 0
    assert charged(long, 1.1, 1.02) == 0
    assert charged(long, 1.5, 0.9) > 10
    assert charged(long, 1.5, 1.02) > 42
    # Where steps that compute prompts too are as long as a token may take, nothing is left to bear.
    assert charged(long, 1.1, 1.02, mixed=0.034) > 42


def test_no_more_answers_are_borne_than_prefill_workers_can_hold_for_decoders() -> None:
    """At 100 ms a token twice as many more as fit would be: their prompts' KV fills three prefill workers twice."""
    long = load(9.7, 4000, 1200)
    assert charged(long, 1.4, 1.02, tpot=0.1) == 0
    assert charged(long, 1.6, 1.02, tpot=0.1) > 42


def test_an_overflow_is_charged_from_when_it_misses_on() -> None:
    """At twice the load what is borne is full within the two horizons: above full, the sooner the more is charged."""
    long = load(12.0, 4000, 1200)
    costs = [charged(long, 1.0 + x / 100, 2.0) for x in range(4, 40, 2)]
    assert costs == sorted(costs)
    assert 0 < costs[0] < 0.9 * costs[-1]
    assert max(b - a for a, b in pairwise(costs)) < 0.2 * costs[-1]


def test_prompts_that_miss_now_do_not_wait() -> None:
    """Four workers' worth of prompts for three, and two seconds of them in line: each second of waiting is missed."""
    prompts = load(60.0, 2000, 20)
    seen = minute(prompts, Queues(6.0, 10.0))
    assert seen.waiting(move(prompts, Split(5, 1))) > 0.5


def test_waiting_costs_what_the_misses_meanwhile_are() -> None:
    """Two seconds of prompts for each worker wait, twice what they may: most that comes meanwhile misses."""
    prompts = load(80.0, 1000, 5)
    queued = Queues(6.0, 0.0)
    stay = Course(HERE, HERE, 0.0)
    missed, offered, _ = fluid.roll(prompts, minute(prompts, queued).model, stay, queued, 10.0)
    assert missed > 0.9 * offered
    assert minute(prompts, queued).waiting(move(prompts, Split(5, 1))) >= missed / offered


@pytest.mark.parametrize("to", [Split(3, 3), Split(2, 4), Split(5, 1), Split(1, 5)])
def test_where_nothing_helps_waiting_costs_what_is_missed(to: Split) -> None:
    """Both roles are short at any split, and queues at the end of the minute look the same whenever it moves."""
    drowning = load(200.0, 2000, 900)
    seen = minute(drowning, Queues(100.0, decoding(drowning, 3.0)))
    assert seen.waiting(move(drowning, to)) >= 0.99


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
    """Decoders 75 % full, and the model has them overflow within the minute: reality says otherwise for ever here."""
    source = Source(prefill=3, decode=3, rate=26, prompt=2252, output=906)
    decisions, _ = follow(source, policy(), Memory(), 160)
    assert not [d for d in decisions if d.moves]
    last = decisions[-1]
    assert last.reason == reasons.CAN_WAIT
    assert last.options[0].split == Split(2, 4)
    assert last.options[0].gain > last.inputs["bar"]
    assert "2:4 would gain" in last.message
    assert "in 10 s as much" in last.message


def test_it_moves_once_waiting_would_cost_something() -> None:
    """Decoders 94 % full, and 1.5 prefill workers' worth of prompts for the two that stay."""
    source = Source(prefill=3, decode=3, rate=30, prompt=1400, output=1250)
    decisions, _ = follow(source, policy(), Memory(), 160)
    assert [(d.reason, str(d.target)) for d in decisions if d.moves] == [(reasons.BETTER_SPLIT, "2:4")]


def test_slow_gears_wait_for_nothing() -> None:
    """What a slow move is for has to be begun before it is needed."""
    source = Source(prefill=3, decode=3, rate=26, prompt=2252, output=906)
    decisions, _ = follow(source, policy(gear=Gear(30.0, drains=True)), Memory(), 60)
    assert reasons.CAN_WAIT not in {d.reason for d in decisions}


def test_load_near_a_pool_s_limit_moves_nothing_after_minutes() -> None:
    """The model takes five minutes to fill two decoders that really are as full as they were."""
    source = Source(prefill=2, decode=2, rate=27, prompt=850, output=850)
    decisions, memory = follow(source, policy(), Memory(), 160)
    assert not [d for d in decisions if d.moves]
    assert memory.tracks["2"].queues.decoding <= 27 * 850 * 0.015 + 1
    assert memory.tracks["2"].share == 0.0


@dataclasses.dataclass
class Fluid(Source):
    """A cluster that is what the model says: queues grow where a pool is short, and shrink where it is not."""

    queues: Queues = dataclasses.field(default_factory=Queues)
    missed_of_all: float = 0.0

    def tick(self, seconds: float = 5.0) -> Observation:
        of = load(float(self.rate), self.prompt, self.output)
        course = Course(Split(self.prefill, self.decode), Split(self.prefill, self.decode), 0.0)
        missed, offered, queues = fluid.roll(of, minute(of, Queues()).model, course, self.queues, seconds)
        # A full line is refused, as the engine does it: else a minute of overload is never got over.
        self.queues = Queues(min(20.0 * self.prefill, queues.prefill_seconds), queues.decoding)
        self.missed_of_all += missed / offered / 60
        self.queued = round(self.queues.prefill_seconds * VELOCITY)
        seen = super().tick(seconds)
        each = round(self.queues.decoding / self.decode)
        context = self.prompt + self.output // 2
        return dataclasses.replace(
            seen,
            workers=tuple(
                dataclasses.replace(w, decoding=each, resident_tokens=each * context) if w.role == "decode" else w
                for w in seen.workers
            ),
        )


def missed_and_waited(**at: int) -> tuple[float, int]:
    """Of five minutes: the share that missed, and the looks that said CanWait."""
    source = Fluid(**at)
    decisions, _ = follow(source, policy(), Memory(), 60)
    return source.missed_of_all, sum(d.reason == reasons.CAN_WAIT for d in decisions)


@pytest.mark.parametrize(
    ("prefill", "decode", "rate", "prompt", "output"),
    [(2, 2, 47, 1342, 237), (2, 4, 28, 2438, 642), (4, 2, 40, 925, 1058), (2, 2, 21, 1992, 657), (1, 3, 12, 4945, 295)],
)
def test_overload_is_not_waited_out(
    prefill: int, decode: int, rate: int, prompt: int, output: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than any split bears. Rolled out alone, each move looks as good in 10 s, for ever; but requests miss."""
    at = {"prefill": prefill, "decode": decode, "rate": rate, "prompt": prompt, "output": output}
    missed, _ = missed_and_waited(**at)
    monkeypatch.setattr(value, "NOTHING", -math.inf)
    least, waited = missed_and_waited(**at)
    assert waited == 0
    assert missed <= least + 0.05
