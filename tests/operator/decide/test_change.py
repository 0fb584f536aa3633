"""What the law sees of a change: how long answers have become, and what still runs of the traffic before."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.decide import Memory, Policy, Split, decide, reasons
from forebay_operator.decide.estimate import Estimate, absorb, estimate
from forebay_operator.decide.evidence import SURE, differs
from forebay_operator.decide.fluid import Course, Load, Model, model_of, roll
from forebay_operator.decide.memory import Queues
from forebay_operator.observe.traffic import Observation
from support.observations import WORKERS, Source, policy

LAW = policy()


@pytest.mark.parametrize(
    ("seen", "expected", "sure"),
    [
        (100, 100, False),
        (60, 100, True),
        (80, 100, False),
        (150, 100, True),
        (0, 9, False),
        (0, 10, True),
        (1, 0, True),
    ],
)
def test_what_differs_from_chance(seen: float, expected: float, sure: bool) -> None:
    assert differs(seen, expected) == sure


@pytest.mark.parametrize("mean", [3.0, 20.0, 200.0])
def test_chance_seldom_shows_fewer(mean: float) -> None:
    """By the exact lower tail of the Poisson distribution."""
    most = max((n for n in range(int(mean)) if differs(n, mean)), default=-1)
    tail = math.fsum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(most + 1))
    assert tail <= math.exp(-SURE)


# The length of answers.


def look(source: Source, memory: Memory, seconds: float = 5.0) -> Observation:
    seen = source.tick(seconds)
    absorb(seen, LAW, memory)
    return seen


@pytest.mark.parametrize(("old", "new"), [(1000, 200), (200, 1000), (30, 1000)])
def test_a_new_length_is_known_within_two_looks(old: int, new: int) -> None:
    """A mean over 30 s would be half way there after 15 s."""
    source, memory = Source(rate=60, output=old), Memory()
    for _ in range(12):
        look(source, memory)
    assert memory.output == pytest.approx(old, rel=0.02)
    source.output = new
    for _ in range(2):
        look(source, memory)
    assert memory.output == pytest.approx(new, rel=0.25)


def test_chance_shortens_no_window() -> None:
    """Answers that end one by one, for an hour: the mean over 30 s of 60 a second scatters by a fortieth."""
    rng, source, memory = random.Random(1), Source(rate=0, output=200), Memory()
    found = []
    for _ in range(720):
        seen = source.tick()
        ended, left = 0, rng.expovariate(60)
        while left < 5.0:
            ended, left = ended + 1, left + rng.expovariate(60)
        source.generated, source.finished = source.generated + 60_000, source.finished + ended
        absorb(replace(seen, generated_tokens=source.generated, finished=source.finished), LAW, memory)
        found.append(memory.output)
    assert memory.output_since < 30
    assert all(abs(output - 200) < 20 for output in found[12:])


# What runs of earlier traffic.


def changed(long: int, short: int, law: Policy = LAW) -> tuple[Memory, Estimate]:
    """Answers of 1000 tokens became ones of 200; now `long` of the first and `short` of the second kind run."""
    source, memory = Source(prefill=1, decode=7, rate=20, output=1000), Memory()
    for _ in range(14):
        estimate(look(source, memory), law, memory)
    assert memory.earlier_context == 0
    source.output, source.rate = 200, 60
    for _ in range(3):
        look(source, memory)
    seen = source.tick()
    one = replace(seen.workers[1], decoding=long + short, resident_tokens=long * 1500 + short * 1200)
    seen = replace(seen, workers=(seen.workers[0], one))
    absorb(seen, law, memory)
    found = estimate(seen, law, memory)
    assert found is not None
    return memory, found


@pytest.mark.parametrize(("long", "short"), [(300, 0), (300, 200), (20, 180)])
def test_the_mix_of_old_and_new_requests_is_told_by_their_mean(long: int, short: int) -> None:
    memory, found = changed(long, short)
    assert found.earlier is not None
    assert found.earlier.requests == pytest.approx(long, rel=0.1, abs=5)
    assert found.earlier.context == memory.earlier_context == pytest.approx(1500, rel=0.01)
    assert found.earlier.left == pytest.approx(500, rel=0.02), "as many tokens as they have made"
    assert found.ahead(20).context == pytest.approx(1200, rel=0.05)
    assert found.load(20).context >= found.ahead(20).context


def test_what_has_ended_is_forgotten() -> None:
    memory, found = changed(0, 200)
    assert found.earlier is None
    assert memory.earlier_context == 0
    assert found.ahead(20) == found.load(20)


def test_longer_answers_are_nothing_that_still_runs() -> None:
    source, memory = Source(rate=60, output=200), Memory()
    for _ in range(14):
        estimate(look(source, memory), LAW, memory)
    source.rate, source.output = 14, 1000
    for _ in range(4):
        found = estimate(look(source, memory), LAW, memory)
        assert found is not None
        assert found.earlier is None


def test_the_memory_of_a_change_survives_a_restart() -> None:
    memory, _ = changed(100, 100)
    assert Memory.load(memory.dump()) == memory


# In the fluid model.


def chat(weight: float = 1.0, left: float = 200.0) -> tuple[Load, Model]:
    load = Load([60 * 0.04] * 20, [60.0] * 20, 200.0, 1200.0, 0.04)
    model = model_of(load, WORKERS, 1.0, 1.0, 0.04, False, 30_000.0)
    return load, replace(model, earlier_weight=weight, earlier_left=left)


@given(st.integers(0, 600), st.integers(0, 600), st.floats(0, 40), st.integers(1, 7))
def test_requests_of_the_same_kind_need_not_be_told_apart(old: int, new: int, waiting: float, prefill: int) -> None:
    load, model = chat()
    split = Split(prefill, 8 - prefill)
    course = Course(split, split, 0.0)
    apart = roll(load, model, course, Queues(waiting, float(old + new), float(old)), 60.0, horizon=20.0)
    together = roll(load, model, course, Queues(waiting, float(old + new)), 60.0, horizon=20.0)
    assert apart[:2] == pytest.approx(together[:2])
    assert (apart[2].prefill_seconds, apart[2].decoding) == pytest.approx(
        (together[2].prefill_seconds, together[2].decoding)
    )


def test_heavier_ones_cost_as_long_as_they_stay() -> None:
    load, model = chat(weight=3.0, left=800.0)
    split = Split(4, 4)
    args = (load, model, Course(split, split, 0.0))
    _, _, soon = roll(*args, Queues(0.0, 400.0, 300.0), 5.0)
    _, _, same = roll(*args, Queues(0.0, 400.0), 5.0)
    _, _, late = roll(*args, Queues(0.0, 400.0, 300.0), 120.0)
    _, _, rest = roll(*args, Queues(0.0, 400.0), 120.0)
    assert soon.decoding > 2 * same.decoding
    assert late.decoding == pytest.approx(rest.decoding, rel=0.05)


# Both roles short.


def test_decoders_full_of_earlier_traffic_hold_back_no_prompts() -> None:
    """Long answers fill six decoders when short ones arrive, whose prompts need three workers.

    By demand both roles are short then, and neither may be lent to the other. What the splits are worth decides, and it
    sees that the long ones end.
    """
    source, memory = Source(prefill=2, decode=6, rate=14, prompt=2000, output=1100), Memory()
    law = policy(ttft_seconds=0.5, tpot_seconds=0.02)
    for _ in range(20):
        decision, memory = decide(decoding(source.tick(), 520, 3300), law, memory, source.at)
    assert decision.target == (2, 6)
    source.rate, source.prompt, source.output = 75, 1200, 200
    moved = []
    for i in range(6):
        source.queued += max(0, 5 * (75 * 1200 - source.prefill * 30_000))
        decision, memory = decide(decoding(source.tick(), 520 - 10 * i, 3300), law, memory, source.at)
        source.move(decision.target.prefill)
        if decision.moves:
            moved.append(decision)
    assert [decision.reason for decision in moved] == [reasons.BETTER_SPLIT]
    assert moved[0].inputs["decodeDemand"] > 6
    assert moved[0].target.prefill >= 3


def decoding(seen: Observation, requests: int, context: int) -> Observation:
    """The same, with so many requests in the decode phase, so long in the mean."""
    decoders = [w for w in seen.workers if w.role == "decode"]
    each = requests // len(decoders)
    workers = tuple(
        replace(w, decoding=each, resident_tokens=each * context) if w.role == "decode" else w for w in seen.workers
    )
    return replace(seen, workers=workers)
