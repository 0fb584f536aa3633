"""Moves: who moves, what it costs, what is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, Faults
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.fleet import Fleet, Gear, parse_gear, replica_gear, role_gear
from forebay_operator.replay.job import Job
from forebay_operator.replay.trace import Arrival
from support.replay import MODEL, poisson, setup


def fleet(gear: Gear) -> tuple[Fleet, Cluster]:
    cluster = Cluster(setup(4, 2, gear), FastWorker)
    return cluster.fleet, cluster


def test_a_role_switch_takes_its_second_and_the_emptiest_worker() -> None:
    members, cluster = fleet(role_gear(1.0))
    cluster.workers[0].submit(Job(0, 0.0, 500, 5), 0.0, hold=True)
    assert members.retarget(1, 10.0) == 1
    assert [m.role for m in members.members] == ["prefill", None, "decode", "decode"]
    members.advance(10.9)
    assert members.members[1].role is None
    members.advance(11.0)
    assert members.members[1].role == "decode"
    assert members.move_seconds == [1.0]


def test_the_last_worker_of_a_pool_stays() -> None:
    members, _ = fleet(role_gear(1.0))
    assert members.retarget(0, 0.0) == 1
    assert [w.index for w in members.prefills] == [1]


def test_a_replica_drains_before_it_starts_again() -> None:
    members, cluster = fleet(replica_gear(30.0))
    for number in (0, 1):
        cluster.workers[number].submit(Job(number, 0.0, 500, 5), 0.0, hold=True)
    members.retarget(1, 0.0)
    mover = next(m for m in members.members if m.role is None)
    members.advance(100.0)
    assert mover.draining
    job = Job(9, 0.0, 500, 5)
    mover.worker.boundary(1.0)
    held = Job(mover.worker.index, 0.0, 500, 5)
    mover.worker.release(held, 1.0)
    del job
    members.advance(101.0)
    assert not mover.draining
    members.advance(130.9)
    assert mover.role is None
    members.advance(131.0)
    assert mover.role == "decode"


def test_a_drain_is_taken_back_at_once() -> None:
    members, cluster = fleet(replica_gear(30.0))
    for number in (0, 1):
        cluster.workers[number].submit(Job(number, 0.0, 500, 5), 0.0, hold=True)
    members.retarget(1, 0.0)
    assert members.targets() == (1, 3)
    assert members.retarget(2, 5.0) == 1
    assert [m.role for m in members.members] == ["prefill", "prefill", "decode", "decode"]
    assert members.moves == 2


@pytest.mark.parametrize("text", ["", "replica", "replica-x", "roles"])
def test_bad_gears(text: str) -> None:
    with pytest.raises(ValueError, match="is no gear"):
        parse_gear(text)
    assert parse_gear("replica-30") == replica_gear(30.0)
    assert parse_gear("role") == role_gear()


def test_lag_lost_writes_and_stale_metrics() -> None:
    trace = poisson(5.0, 60.0, 500, 20)
    seen: list[tuple[float, float]] = []

    def note(observation: Observation, now: float) -> int:
        seen.append((now, observation.taken_at))
        return 1

    made = setup(4, 2)
    faults = Faults(metric_lag_seconds=10.0, lost_writes=1.0, stale=((20.0, 40.0),))
    cluster = Cluster(type(made)(**{**{f: getattr(made, f) for f in made.__slots__}, "faults": faults}), FastWorker)
    outcome = cluster.run(trace, note)
    assert outcome.moves == 0
    ages = {now: now - taken for now, taken in seen}
    assert ages[15.0] == 10.0
    assert ages[25.0] == 10.0  # taken at 15, the last before the source stood still
    assert ages[45.0] == 30.0
    assert ages[55.0] == 10.0


def test_observations_lose_no_arrival() -> None:
    trace = poisson(20.0, 57.0, 500, 20)
    total = 0
    last = 0.0

    def count(observation: Observation, now: float) -> None:
        nonlocal total, last
        last = now
        total += sum(a.requests for a in observation.arrivals)

    Cluster(setup(4, 2), FastWorker).run(trace, count)
    assert total == sum(1 for a in trace if a.at < last) > 1000


def test_every_request_is_served_once_and_every_token_counted() -> None:
    trace = poisson(15.0, 30.0, 800, 60, seed=5)
    for convertible in (False, True):
        cluster = Cluster(setup(3, 1, convertible=convertible), FastWorker)
        outcome = cluster.run(trace)
        assert all(job.last >= job.first > job.arrived for job in outcome.jobs)
        assert sum(w.generated for w in cluster.workers) == sum(a.output_tokens - 1 for a in trace)
        assert all(w.in_flight == 0 and w.queued_tokens == 0 for w in cluster.workers)
        assert all(w.free_tokens == MODEL.kv_capacity_tokens // 16 * 16 for w in cluster.workers)


def test_a_lone_request_takes_the_models_times() -> None:
    outcome = Cluster(setup(2, 1), FastWorker).run([Arrival(0.0, 1000, 3)])
    job = outcome.jobs[0]
    assert job.first == pytest.approx(MODEL.prefill_seconds(1000))
    steps = MODEL.decode_seconds(1, 1001) + MODEL.decode_seconds(1, 1002)
    assert job.last - job.first == pytest.approx(MODEL.handoff_seconds(1000) + steps)


def test_a_prompt_beyond_memory_is_refused_not_lost() -> None:
    outcome = Cluster(setup(2, 1), FastWorker).run([Arrival(0.0, MODEL.kv_capacity_tokens, 3)])
    assert outcome.jobs[0].refused


@pytest.mark.parametrize("convertible", [False, True])
def test_refused_early_others_keep_their_objective(convertible: bool) -> None:
    """Half as much again as two workers prefill: without refusals the queue grows, with them it stays short."""
    trace = poisson(18.0, 40.0, 5000, 4, seed=3)
    made = replace(setup(4, 2), convertible=convertible)
    late, early = (Cluster(replace(made, refusal_factor=factor), FastWorker).run(trace).jobs for factor in (0.0, 0.9))
    assert not any(job.refused for job in late)
    served = [job for job in early if not job.refused]
    assert 0 < len(served) < len(early)
    in_time = [job for job in served if job.first - job.arrived <= made.ttft_seconds]
    assert len(in_time) > 0.95 * len(served)
    assert len(in_time) > sum(job.first - job.arrived <= made.ttft_seconds for job in late)
    assert not any(job.refused for job in Cluster(replace(made, refusal_factor=0.9), FastWorker).run(trace[:1]).jobs)
