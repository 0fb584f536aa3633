"""A drain that reaches its deadline: what is left goes on elsewhere, whole, and pays for it. Both paths."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forebay_operator.api.v1alpha1 import Drain
from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, MakeWorker, Setup
from forebay_operator.replay.exact import ExactWorker
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.fleet import replica_gear
from forebay_operator.replay.job import Job
from forebay_operator.replay.score import score
from forebay_operator.replay.trace import Arrival
from forebay_operator.replay.worker import Worker
from support.replay import MODEL, poisson, setup

PATHS = pytest.mark.parametrize("path", [FastWorker, ExactWorker])
GEAR = replica_gear(3.0)


def draining(seconds: float, workers: int = 4, prefill: int = 2) -> Setup:
    return replace(setup(workers, prefill, GEAR), drain_seconds=seconds)


def hand_on(cluster: Cluster, leaving: Worker, now: float) -> None:
    """As at the end of its drain."""
    cluster.fleet.members[leaving.index].role = None
    cluster.fleet._index()
    cluster._hand_on(leaving, now)


def test_the_deadline_is_the_operators() -> None:
    assert setup().drain_seconds == Drain().timeout_seconds == 600


@PATHS
def test_a_stream_goes_on_after_one_prefill_of_what_was_there(path: MakeWorker) -> None:
    """Its decode worker leaves at 5 s and is cut short at 7 s."""
    cluster = Cluster(draining(2.0, workers=3, prefill=1), path)

    def leave(seen: Observation, now: float) -> None:
        if now == 5.0:
            member = next(m for m in cluster.fleet.members if m.worker.decoding)
            cluster.fleet._move(member, "prefill", now)

    outcome = cluster.run([Arrival(0.0, 1000, 1500), Arrival(60.0, 10, 1)], leave)
    job = outcome.jobs[0]
    assert outcome.handed_on == 1
    # Until 7 s it decodes where it was; then known tokens are computed anew, which gives the next one.
    at = job.first + MODEL.handoff_seconds(1000)
    made = 1
    while (after := at + MODEL.decode_seconds(1, 1000 + made)) <= 7.0:
        at, made = after, made + 1
    assert 100 < made < 1400
    steps = [(start, min(2048, 1000 + made - start)) for start in range(0, 1000 + made, 2048)]
    last = 7.0 + sum(MODEL.step_seconds([(size, start)], 0, 0) for start, size in steps)
    last += sum(MODEL.decode_seconds(1, 1000 + n) for n in range(made + 1, 1500))
    assert job.last == pytest.approx(last, abs=1e-6)
    assert job.generated == 1500
    assert outcome.move_seconds == [5.0], "two of drain, three of start"
    assert sum(worker.generated for worker in cluster.workers) == 1499


@PATHS
@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("convertible", [False, True])
def test_nothing_is_lost_and_every_token_counted_once(path: MakeWorker, seconds: float, convertible: bool) -> None:
    trace = poisson(12.0, 20.0, 1500, 700, seed=4)
    cluster = Cluster(replace(draining(seconds), convertible=convertible), path)
    splits = itertools.cycle([1, 3, 2])

    def swing(seen: Observation, now: float) -> int:
        return next(splits)

    outcome = cluster.run(trace, swing)
    assert outcome.handed_on > 0
    assert all(job.last >= job.first > job.arrived for job in outcome.jobs)
    assert all(job.generated == job.output for job in outcome.jobs)
    assert sum(worker.generated for worker in cluster.workers) == sum(a.output_tokens - 1 for a in trace)
    assert all(w.in_flight == 0 and w.queued_tokens == 0 and w.waiting_pulls == 0 for w in cluster.workers)
    assert all(w.free_tokens == MODEL.kv_capacity_tokens // 16 * 16 for w in cluster.workers)


@PATHS
def test_a_longer_deadline_changes_nothing_when_drains_end_before_it(path: MakeWorker) -> None:
    trace = poisson(12.0, 20.0, 1500, 50, seed=4)
    splits = dict(zip((5.0, 15.0), (1, 2), strict=True))
    scores = []
    for seconds in (60.0, 600.0):
        made = draining(seconds)
        scores.append(score(Cluster(made, path).run(trace, lambda seen, now: splits.get(now)), made))
    assert scores[0] == scores[1]
    assert scores[0].handed_on == 0
    assert scores[0].moves == 2


@PATHS
def test_a_prefill_worker_hands_its_prompts_on_and_what_it_held_is_computed_where_it_was_to_decode(
    path: MakeWorker,
) -> None:
    cluster = Cluster(draining(0.0), path)
    prompts = [Job(number, 0.0, 2000, 5) for number in range(3)]
    leaving = cluster.workers[0]
    for job in prompts:
        leaving.submit(job, 0.0, hold=True)
    leaving.boundary(0.2)
    assert prompts[0].first == 0.2
    assert cluster.workers[1].queued_tokens == 0
    hand_on(cluster, leaving, 0.2)
    assert leaving.in_flight == 0
    assert leaving.free_tokens == MODEL.kv_capacity_tokens // 16 * 16
    (sink,) = (worker for worker in cluster.workers[2:] if worker.in_flight)
    # Two begin again, one was read from the worker that is gone.
    assert sum(worker.queued_tokens for worker in cluster.workers[:2]) == 4000
    assert sink.decoding == 1
    _, serial, index, job = min(event for event in cluster._events if event[3] is prompts[0] and event[0] == 0.2)
    assert (index, job) == (sink.index, prompts[0])
    assert cluster._reading[0] == (serial, index)
    cluster._read(sink, prompts[0], 0.2)
    assert sink.queued_tokens == 2001
    assert sink.waiting_pulls == 0


@PATHS
def test_a_decode_leg_without_a_token_is_read_by_another_worker(path: MakeWorker) -> None:
    cluster = Cluster(draining(0.0), path)
    job = Job(0, 0.0, 2000, 5)
    cluster.workers[0].submit(job, 0.0, hold=True)
    cluster.workers[0].boundary(0.2)
    (sink,) = (worker for worker in cluster.workers[2:] if worker.in_flight)
    hand_on(cluster, sink, 0.2)
    (other,) = (worker for worker in cluster.workers[2:] if worker.in_flight)
    assert other is not sink
    assert job.held_by == 0
    assert cluster.workers[0].in_flight == 1, "its KV is still held"
    assert cluster._reading[0][1] == other.index
    assert sum(worker.queued_tokens for worker in cluster.workers) == 0


def test_a_full_line_does_not_refuse_what_was_taken_in() -> None:
    made = draining(0.0)
    cluster = Cluster(replace(made, shape=replace(made.shape, max_waiting=2), refusal_factor=0.1), FastWorker)
    leaving, other = cluster.workers[:2]
    for number in range(6):
        (leaving if number % 2 else other).submit(Job(number, 0.0, 9000, 5), 0.0, hold=True)
    hand_on(cluster, leaving, 0.1)
    assert other.in_flight == 6
