"""The fast path against the exact one, the engine's scheduler: within 0.3 points and a request on this grid."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from forebay_operator.replay.cluster import Cluster, Decide, Setup
from forebay_operator.replay.exact import ExactWorker
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.fleet import replica_gear
from forebay_operator.replay.policies import LAWS
from forebay_operator.replay.run import plant_of
from forebay_operator.replay.score import Score, score
from forebay_operator.replay.trace import Trace
from forebay_operator.replay.worker import WorkerShape
from support.replay import MODEL, poisson, setup

LONG = poisson(9.0, 12.0, 3000, 40, seed=1)
CHAT = poisson(24.0, 10.0, 900, 100, seed=2)
TIGHT_MEMORY = replace(
    setup(2, 1), model=msgspec.structs.replace(MODEL, kv_capacity_tokens=12_000), ttft_seconds=2.0, tpot_seconds=0.02
)
SWINGING = replace(setup(4, 2, replica_gear(3.0)), drain_seconds=2.0, tpot_seconds=0.012)
GRID: dict[str, tuple[Setup, Trace, str | None]] = {
    "prefill short": (setup(3, 1), LONG, None),
    "decode-heavy chat": (setup(3, 1), CHAT, None),
    "convertible": (setup(3, 1, convertible=True), LONG, None),
    "memory full, preemptions": (TIGHT_MEMORY, CHAT, None),
    "law in role gear": (setup(4, 2), [*LONG, *(a._replace(at=a.at + 12) for a in CHAT)], "demand"),
    "law in replica gear": (
        setup(4, 2, replica_gear(3.0)),
        [*LONG, *(a._replace(at=a.at + 12) for a in CHAT)],
        "demand",
    ),
    "drains that are cut short": (SWINGING, poisson(14.0, 40.0, 1500, 700, seed=4), "swing"),
    "drains that are cut short, convertible": (
        replace(SWINGING, convertible=True),
        poisson(14.0, 40.0, 1500, 700, seed=5),
        "swing",
    ),
    "all is handed on at once": (replace(SWINGING, drain_seconds=0.0), poisson(14.0, 40.0, 1500, 700, seed=6), "swing"),
    "line full": (replace(setup(2, 1), shape=WorkerShape(max_waiting=8)), LONG, None),
}


def law_of(name: str | None, setup: Setup) -> Decide | None:
    """`swing`: from one end to the other, whoever is busy."""
    splits = itertools.cycle([1, 3, 2])
    if name == "swing":
        return lambda seen, now: next(splits)
    return LAWS[name](plant_of(setup)) if name else None


def both(setup: Setup, trace: Trace, law: str | None) -> tuple[Score, Score]:
    scores = []
    for worker in (FastWorker, ExactWorker):
        decide = law_of(law, setup)
        scores.append(score(Cluster(setup, worker).run(trace, decide), setup))
    return scores[0], scores[1]


@pytest.mark.parametrize("case", GRID)
def test_the_fast_path_agrees_with_the_scheduler(case: str) -> None:
    fast, exact = both(*GRID[case])
    assert fast.requests == exact.requests > 100
    assert abs(fast.refused - exact.refused) <= 0.003 * exact.requests + 1
    assert fast.unfinished == exact.unfinished == 0
    for name in ("attainment_percent", "ttft_percent", "tpot_percent"):
        assert getattr(fast, name) == pytest.approx(getattr(exact, name), abs=0.3 + 100 / exact.requests), name


def test_the_grid_is_no_bed_of_roses() -> None:
    """Both sides of each objective, refusals and preemptions occur on it, or agreement would mean nothing."""
    scores = {}
    for case, (made, trace, law) in GRID.items():
        decide = law_of(law, made)
        scores[case] = score(Cluster(made, FastWorker).run(trace, decide), made)
    assert scores["prefill short"].ttft_percent < 90
    assert scores["memory full, preemptions"].preemptions > 0
    assert scores["memory full, preemptions"].tpot_percent < 99
    assert scores["line full"].refused > 0
    assert scores["convertible"].ttft_percent > scores["prefill short"].ttft_percent
    assert scores["law in role gear"].moves > 0
    assert scores["law in replica gear"].moves > 0
    assert scores["law in replica gear"].handed_on == 0
    for case in ("drains that are cut short", "drains that are cut short, convertible", "all is handed on at once"):
        assert scores[case].handed_on > 100
        assert 5 < scores[case].tpot_percent < 95
