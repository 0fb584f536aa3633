"""The law over time: what is told, what a restart knows, what is believed of the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from forebay_engine.perf import load
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec, Objectives
from forebay_operator.calibrate.believed import read_speeds
from forebay_operator.decide import Memory, Rate, Rules, Split, Workers, reasons
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.traffic import Arrivals, Health, Observation, Signal, WorkerLoad
from forebay_operator.pilot import CHECKPOINT_SECONDS, RESUME_SECONDS, Checkpoint, Pilot
from forebay_operator.policy import law_policy

WORKERS = Workers(5000.0, 0.02, 0.0, 16_384, sequence_seconds=0.0005, max_batch=64)
START = 1_800_000_000.0
FILE = msgspec.json.encode(load("slow")).decode()
OTHER = msgspec.json.encode(load("h100-llama-8b")).decode()


def spec(mode: str = "Auto", ttft: int = 1000, tpot: int = 40, **scaling: Any) -> DisaggregatedModelSpec:
    return DisaggregatedModelSpec.model_validate(
        {
            "model": {"servedName": "m"},
            "engine": {"type": "Simulated"},
            "objectives": {"timeToFirstTokenMilliseconds": ttft, "timePerOutputTokenMilliseconds": tpot},
            "scaling": {"mode": mode, **scaling},
            "prefill": {"replicas": 2},
            "decode": {"replicas": 4},
            "router": {"convertible": "Never"},
        }
    )


def restarted(life: Life, *, windows: bool = False) -> Checkpoint:
    """Through JSON, as status and the state folder keep it."""
    made = life.pilot.checkpoint(life.capacity, windows=windows)
    return msgspec.json.decode(msgspec.json.encode(made), type=Checkpoint)


class Life:
    """A pilot, its traffic and its targets, one look a second."""

    def __init__(self, spec: DisaggregatedModelSpec, checkpoint: Checkpoint | None = None, at: float = START) -> None:
        self.spec = spec
        self.now = at
        self.target = Split(2, 4)
        self.pilot = Pilot(checkpoint, now=at)
        self.finished = 0
        self.told: list[str] = []
        self.moves: list[Split] = []
        self.learnt: Workers | None = WORKERS
        self.capacity = Capacity([5000.0])
        self.away = 0
        """Of the decode workers, how many report nothing."""

    def look(
        self, prompts: int = 4, tokens: int = 500, queued: int = 0, bad: Signal | None = None, decoding: int = 0
    ) -> None:
        self.now += 1
        self.finished += prompts
        loads = [
            WorkerLoad(
                f"w{i}",
                role,
                role,
                queued_prefill_tokens=queued if role == "prefill" else 0,
                decoding=decoding // self.target.decode if role == "decode" else 0,
            )
            for i, role in enumerate(["prefill"] * self.target.prefill + ["decode"] * self.target.decode)
        ]
        observed = Observation(
            self.now,
            (Arrivals(float(int(self.now)), prompts, prompts * tokens),),
            self.finished * 50,
            self.finished,
            0,
            0,
            0,
            workers=tuple(loads),
            signals=(bad,) if bad else (),
        )
        for i in range(len(loads) - self.away, len(loads)):
            observed = replace(
                observed, workers=(*observed.workers[:i], replace(loads[i], role=None), *observed.workers[i + 1 :])
            )
        before = self.pilot.told
        self.pilot.start_from(self.spec, self.capacity)
        ruling = self.pilot.rule(observed, self.spec, self.target, self.learnt, self.now)
        if ruling.move is not None:
            self.moves.append(ruling.move)
            self.target = ruling.move
        if ruling.told is not before and ruling.told is not None:
            self.told.append(ruling.told.reason)

    def calm(self, seconds: int = 70) -> Life:
        for _ in range(seconds):
            self.look()
        return self

    def surge(self, seconds: int = 10) -> None:
        """20,000 prompt tokens a second are four workers' work."""
        for i in range(seconds):
            self.look(prompts=10, tokens=2000, queued=min(5, i) * 5000)


def test_a_starved_role_is_helped_within_seconds() -> None:
    life = Life(spec()).calm()
    assert life.moves == []
    life.surge(5)
    assert life.moves
    assert life.moves[0].prefill > 2
    assert life.told[-1] == reasons.STARVED


@pytest.mark.parametrize("away", [0, 1])
def test_a_worker_that_is_away_does_not_keep_moves_from_being_taken_back(away: int) -> None:
    """Its pod is Pending, or it starts again: it has no role, which is not the end that a move waits for."""
    life = Life(spec()).calm()
    life.away = away
    life.surge(5)
    lent = life.target
    life.calm(2)
    for _ in range(40):
        life.look(decoding=2000)
        if life.target.decode > lent.decode:
            break
    assert life.target.decode > lent.decode


def test_what_could_not_be_carried_out_is_not_remembered() -> None:
    """A move that was refused, again at each look, is no move: not told, not counted against the rate of moves."""
    life = Life(spec()).calm()
    told, history = life.pilot.told, list(life.pilot.history)
    held = life.target
    for _ in range(20):
        life.look(prompts=10, tokens=2000, queued=25_000)
        if life.target != held:
            life.pilot.not_carried_out()
            life.target = held
    assert life.moves
    assert (life.pilot.memory.moves, life.pilot.flaps) == ([], 0)
    assert (life.pilot.told, life.pilot.history) == (told, history)
    life.look(prompts=10, tokens=2000, queued=25_000)
    assert life.target.prefill > held.prefill


def test_recommend_moves_nothing_and_says_it_once() -> None:
    life = Life(spec("Recommend")).calm()
    life.surge(12)
    assert (life.moves, life.target) == ([], Split(2, 4))
    assert life.told.count(reasons.STARVED) == 1
    told = life.pilot.told
    assert told is not None
    assert (told.apply, told.target.prefill > 2) == (False, True)


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"mode": "Off"}, reasons.OFF),
        ({"roleSwitching": "Disabled"}, reasons.OFF),
        ({"pause": "All"}, reasons.PAUSED),
        ({"pause": "ScaleUp"}, reasons.PAUSED),
        ({"behavior": {"scaleUp": {"selectPolicy": "Disabled"}}}, reasons.PAUSED),
    ],
)
def test_what_forbids_a_move_is_told(scaling: dict[str, Any], reason: str) -> None:
    life = Life(spec(**scaling)).calm()
    life.surge(12)
    assert life.moves == []
    assert life.told[-1] == reason


@pytest.mark.parametrize(
    ("objectives", "said"),
    [
        ((0, 0), "no objectives are set"),
        ((0, 40), "no TTFT objective is set"),
        ((1000, 0), "no TPOT objective is set"),
    ],
)
def test_without_objectives_the_split_follows_demand_and_says_so(objectives: tuple[int, int], said: str) -> None:
    ttft, tpot = objectives
    life = Life(spec(ttft=ttft, tpot=tpot)).calm()
    life.surge(30)
    assert life.moves
    assert life.moves[-1].prefill > 2
    assert set(life.told[1:]) == {reasons.NO_OBJECTIVES}, "after WarmingUp"
    moves = len(life.moves)
    life.surge(30)
    told = life.pilot.told
    assert told is not None
    assert (told.reason, told.message.startswith(said)) == (reasons.NO_OBJECTIVES, True)
    assert len(life.moves) == moves, "it stays where demand is"


def test_a_pause_of_one_direction_leaves_the_other() -> None:
    life = Life(spec(pause="ScaleDown")).calm()
    life.surge(6)
    assert life.moves


def test_a_hold_is_told_when_it_lasts() -> None:
    life = Life(spec()).calm()
    stale = Signal("router r", "/load", Health.STALE, note="no use for 6 s: no answer")
    life.look(bad=stale)
    assert life.told[-1] != reasons.METRICS_STALE
    for _ in range(6):
        life.look(bad=stale)
    assert life.told[-1] == reasons.METRICS_STALE
    assert [s.name for s in life.pilot.trouble()] == ["router r"]
    life.calm(10)
    assert life.told[-1] != reasons.METRICS_STALE
    assert life.pilot.trouble() == []


def test_before_speeds_are_known_it_waits_and_windows_fill() -> None:
    life = Life(spec())
    life.learnt = None
    life.calm(60)
    assert life.told == [reasons.WARMING_UP]
    life.learnt = WORKERS
    life.look()
    life.surge(5)
    assert life.moves, "the minute before was not for nothing"


class TestBelief:
    def test_a_fit_near_what_is_believed_changes_nothing(self) -> None:
        life = Life(spec()).calm(5)
        life.learnt = Workers(5200.0, 0.0201, 0.0, 16_384, sequence_seconds=0.00051, max_batch=64)
        life.look()
        assert life.pilot.believed == WORKERS

    def test_another_speed_takes_its_place_and_corrections_start_anew(self) -> None:
        life = Life(spec()).calm(5)
        life.pilot.memory.decode_samples = [1.1]
        life.learnt = Workers(2500.0, 0.02, 0.0, 16_384, sequence_seconds=0.0005, max_batch=64)
        life.look()
        assert life.pilot.believed == life.learnt
        assert life.pilot.memory.decode_samples == []


class TestPerformanceModel:
    def begun(self, text: str = FILE, checkpoint: Checkpoint | None = None, at: float = START) -> Life:
        life = Life(spec(performanceModel=text), checkpoint, at)
        life.learnt = None
        return life

    def test_the_law_starts_from_it(self) -> None:
        life = self.begun()
        life.calm(65)
        assert life.pilot.believed == read_speeds(FILE)
        assert reasons.WARMING_UP not in life.told[1:]
        life.surge(5)
        assert life.moves, "no worker has been measured"

    def test_what_is_learnt_takes_its_place_and_outlasts_a_restart(self) -> None:
        life = self.begun().calm(5)
        life.learnt = WORKERS
        life.look()
        assert life.pilot.believed == WORKERS
        life.capacity.velocities = [5000.0]
        again = self.begun(FILE + "\n", restarted(life), life.now).calm(5)
        assert again.pilot.believed == WORKERS
        assert again.capacity.velocities == [5000.0]

    @pytest.mark.parametrize("before", [FILE, None])
    def test_another_text_starts_anew(self, before: str | None) -> None:
        life = Life(spec() if before is None else spec(performanceModel=before)).calm(5)
        life.pilot.memory.decode_samples = [1.1]
        again = self.begun(OTHER, restarted(life), life.now)
        again.look()
        assert again.pilot.believed == read_speeds(OTHER)
        assert again.capacity.velocities == []
        assert again.pilot.memory.decode_samples == []

    @pytest.mark.parametrize("after", ["{", None])
    def test_one_that_is_taken_out_or_cannot_be_read_changes_nothing(self, after: str | None) -> None:
        life = self.begun().calm(5)
        life.spec = spec() if after is None else spec(performanceModel=after)
        life.look()
        assert life.pilot.believed == read_speeds(FILE)
        assert Life(life.spec).calm(5).pilot.believed == WORKERS


class TestRestart:
    def test_it_holds_until_its_windows_are_full(self) -> None:
        """In the middle of a surge: the move may come late, and no other comes instead."""
        life = Life(spec()).calm()
        life.surge(2)
        again = Life(spec(), restarted(life, windows=False), at=life.now)
        assert again.pilot.believed == WORKERS, "what takes long to learn is not lost"
        again.surge(50)
        assert again.moves == []
        again.surge(15)
        assert again.moves

    def test_soon_enough_nothing_is_lost(self) -> None:
        life = Life(spec()).calm()
        again = Life(spec(), restarted(life, windows=True), at=life.now + 2)
        again.finished = life.finished
        again.surge(5)
        assert again.moves

    def test_too_late_the_windows_are_not_believed(self) -> None:
        life = Life(spec()).calm()
        again = Life(spec(), restarted(life, windows=True), at=life.now + RESUME_SECONDS + 1)
        again.surge(10)
        assert again.moves == []

    @pytest.mark.parametrize("skew", [-300.0, 300.0])
    def test_clocks_five_minutes_apart_only_delay(self, skew: float) -> None:
        """The next leader's clock is ahead or behind: the rate limit holds, and the windows start anew."""
        life = Life(spec()).calm()
        life.surge(5)
        moved = len(life.moves)
        again = Life(spec(), restarted(life, windows=True), at=life.now + skew)
        again.target = life.target
        assert all(m.at <= again.now for m in again.pilot.memory.moves)
        again.calm(80)
        again.surge(10)
        assert moved
        assert len(again.moves) <= 2
        assert again.pilot.flaps == 0

    def test_a_length_that_changed_by_a_clock_that_was_ahead(self) -> None:
        """Answers became longer a moment before the operator's clock was set back: what ended since then is nothing."""
        life = Life(spec()).calm()
        life.pilot.memory.output_since = life.now
        life.pilot.memory.regime_worse_at = life.now
        again = Life(spec(), restarted(life, windows=True), at=life.now - 300.0).calm(80)
        assert again.pilot.memory.output_since < again.now
        assert again.pilot.memory.regime_worse_at <= again.now
        assert again.pilot.memory.output > 0
        assert again.moves == []

    def test_what_another_version_wrote_is_learnt_anew(self) -> None:
        for garbage in ({"target": "x"}, {"moves": 3}, {"arrivals": [["a"]]}):
            assert Pilot(Checkpoint(memory=garbage), now=START).memory == Memory()

    def test_checkpoints_are_seldom_and_of_news(self) -> None:
        life = Life(spec())
        due = []
        for second in range(400):
            life.look()
            if life.pilot.checkpoint_due(life.now):
                due.append(second)
        assert due
        assert due[0] >= CHECKPOINT_SECONDS - 1
        assert len(due) <= 2, "nothing that it learns changes"


def test_policy_of_a_spec() -> None:
    bounded = DisaggregatedModelSpec.model_validate(
        {
            "model": {"servedName": "m"},
            "engine": {"type": "Simulated"},
            "objectives": {"attainmentPercent": 95},
            "prefill": {},
            "decode": {"replicas": 3},
            "scaling": {
                "prefill": {"minReplicas": 2, "maxReplicas": 5},
                "ratio": {"min": "1:3", "max": "2:1"},
                "behavior": {
                    "scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 30}]},
                    "scaleDown": {
                        "selectPolicy": "Min",
                        "policies": [
                            {"type": "Percent", "value": 50, "periodSeconds": 60},
                            {"type": "Pods", "value": 4, "periodSeconds": 600},
                        ],
                    },
                },
                "metrics": {"source": "Prometheus", "url": "http://p:9090"},
            },
        }
    )
    policy = law_policy(bounded, WORKERS, 6)
    bounds = policy.bounds
    assert (bounds.prefill_min, bounds.prefill_max, bounds.decode_min, bounds.decode_max) == (2, 5, 1, 5)
    assert (str(bounds.ratio_min), str(bounds.ratio_max)) == ("1:3", "2:1")
    assert policy.move_rules == (
        Rules(rates=(Rate("Pods", 2, 30.0),)),
        Rules(select="Min", rates=(Rate("Percent", 50, 60.0), Rate("Pods", 4, 600.0))),
    )
    assert policy.convertible
    assert policy.workers.mixed_seconds == pytest.approx(0.09), "of a TPOT objective of 100 ms"
    assert policy.workers.mixed_chunk == 350
    assert policy.stale_seconds == 90
    assert policy.attainment == 0.95


@pytest.mark.parametrize("behavior", [None, {}, {"scaleUp": {"stabilizationWindowSeconds": 9}}])
def test_without_policies_the_laws_own_rate_holds(behavior: dict[str, Any] | None) -> None:
    found = law_policy(spec(behavior=behavior), WORKERS, 6)
    assert (found.moves_per_minute, found.move_rules) == (12, ())


def test_where_roles_are_not_switched_no_policy_allows_a_move() -> None:
    rules = {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 30}]}
    found = law_policy(spec(behavior={"scaleUp": rules}, roleSwitching="Disabled"), WORKERS, 6)
    assert (found.moves_per_minute, found.move_rules) == (0, ())


def test_an_objective_of_0_is_none_and_one_left_out_its_default() -> None:
    """And so is the mixed step, whose length is a share of the TPOT objective."""
    neither = law_policy(spec(ttft=0, tpot=0), WORKERS, 6)
    assert (neither.ttft_seconds, neither.tpot_seconds) == (None, None)
    assert neither.workers == WORKERS
    left_out = spec().model_copy(update={"objectives": Objectives()})
    usual = law_policy(left_out, WORKERS, 6)
    assert (usual.ttft_seconds, usual.tpot_seconds) == (1.0, 0.1)
