"""A shortage told from a second or two of prompts: soon for a step, never for chance."""

from __future__ import annotations

import math
import random

import pytest

from forebay_operator.decide import Memory, Split, decide, reasons
from forebay_operator.decide.evidence import SURE, beyond_chance
from forebay_operator.observe.traffic import Arrivals, Observation, WorkerLoad
from support.law_world import SPEED
from support.observations import policy

START = Split(1, 5)
VELOCITY = 5000
PROMPT = 1500
"""Tokens: 0.3 s of a worker."""


@pytest.mark.parametrize(
    ("seen", "expected", "sure"),
    [(0, 3, False), (3, 3, False), (9, 3, False), (12, 3, False), (14, 3, True), (1, 0, True), (0, 0, False)],
)
def test_what_is_beyond_chance(seen: float, expected: float, sure: bool) -> None:
    assert beyond_chance(seen, expected) == sure


@pytest.mark.parametrize("mean", [0.5, 3.0, 20.0, 200.0])
def test_chance_seldom_shows_it(mean: float) -> None:
    """By the exact tail of the Poisson distribution."""
    least = next(n for n in range(1000) if beyond_chance(n, mean))
    tail = math.fsum(math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(least, least + 400))
    assert tail <= math.exp(-SURE)


class Pool:
    """Six workers at 1:5 that serve prompts in turn; looked at each second, with whole seconds of arrivals."""

    def __init__(self, split: Split = START) -> None:
        self.law = policy(ttft_seconds=1.0, tpot_seconds=0.06, convertible=False, workers=SPEED)
        self.split = split
        self.memory = Memory()
        self.now = 1000.0
        self.queued = 0.0
        self.finished = 0

    def look(self, prompts: int) -> str:
        """A second with so many prompts; the reason of the decision at its end."""
        self.now += 1
        self.finished += prompts
        self.queued = max(0.0, self.queued + prompts * PROMPT - self.split.prefill * VELOCITY)
        roles = ["prefill"] * self.split.prefill + ["decode"] * self.split.decode
        loads = tuple(
            WorkerLoad(f"w{i}", role, role, queued_prefill_tokens=round(self.queued) if not i else 0)  # type: ignore[arg-type]
            for i, role in enumerate(roles)
        )
        came = (Arrivals(self.now, prompts, prompts * PROMPT),)
        seen = Observation(self.now, came, self.finished * 4, self.finished, 0, 0, 0, workers=loads)
        decision, self.memory = decide(seen, self.law, self.memory, self.now)
        self.split = decision.target
        return decision.reason


def test_a_step_is_seen_in_its_first_full_second_and_more_follows() -> None:
    pool = Pool()
    for _ in range(70):
        pool.look(0 if pool.now % 5 else 1)
    assert pool.look(16) == reasons.STARVED
    assert pool.split == (2, 4), "one worker on so little"
    for _ in range(6):
        pool.look(16)
    assert pool.split.prefill == 5, "the next looks show the rest"


def test_a_steady_pool_that_is_nearly_full_moves_nobody_by_it() -> None:
    """Prompts that come one by one, at 70 % of what two workers take, for twenty minutes."""
    rng = random.Random(0)
    pool = Pool(Split(2, 4))
    rate = 0.7 * 2 * VELOCITY / PROMPT
    told: list[str] = []
    for _ in range(1200):
        came, left = 0, rng.expovariate(rate)
        while left < 1.0:
            came, left = came + 1, left + rng.expovariate(rate)
        before = pool.split
        reason = pool.look(came)
        if pool.split != before:
            told.append(f"{pool.now:.0f} {before} {pool.split} {reason}")
    assert len(told) <= 1, told


def test_traffic_that_changed_and_a_queue_past_the_objective_move_one_worker_once() -> None:
    """An eighth more than two workers can take: in ten seconds' mean it shows late, in the queue soon."""
    pool = Pool(Split(2, 4))
    for _ in range(80):
        pool.look(2)
    seen = [pool.look(8 if pool.now % 2 else 7) for _ in range(40)]
    assert seen.index(reasons.STARVED) <= 6
    assert pool.split == (3, 3), "what the move was made for asks for no other"


def test_a_queue_alone_moves_nobody_on_so_little() -> None:
    """It is as long, and traffic is what it was: chance, until ten seconds show more."""
    pool = Pool(Split(2, 4))
    for _ in range(80):
        pool.look(5)
    pool.queued = 2.0 * VELOCITY
    assert pool.look(5) != reasons.STARVED
