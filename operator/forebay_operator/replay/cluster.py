"""The event loop of a replay: arrivals, steps, hand-offs, roles and the policy's ticks in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from forebay_engine.perf import PerfModel
from forebay_operator.api.v1alpha1 import Drain
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.traffic import Arrivals, Observation, WorkerLoad
from forebay_operator.replay.fleet import Fleet, Gear, role_gear
from forebay_operator.replay.job import Job
from forebay_operator.replay.routing import Routing
from forebay_operator.replay.trace import Trace
from forebay_operator.replay.worker import Gaps, Listener, Worker, WorkerShape
from forebay_wire import metrics as names

TICK_SECONDS = 5.0
DRAIN_SECONDS = float(Drain().timeout_seconds)
"""The operator's."""

LATENCY_WINDOW_SECONDS = 60.0
PATIENCE_SECONDS = 600.0
"""After the last arrival: what has not ended by then counts as missed."""

MakeWorker = Callable[[int, PerfModel, WorkerShape, float, Listener], Worker]
Decide = Callable[[Observation, float], int | None]
"""(observation, now) -> wanted number of prefill workers, or None: no change."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What may be wrong between the cluster and the law."""

    metric_lag_seconds: float = 0.0
    lost_writes: float = 0.0
    """Share of the law's changes that never arrive."""

    stale: tuple[tuple[float, float], ...] = ()
    """(from, to) seconds during which observations stand still."""


@dataclass(frozen=True, slots=True)
class Setup:
    model: PerfModel
    workers: int
    start_prefill: int
    ttft_seconds: float
    tpot_seconds: float
    shape: WorkerShape = field(default_factory=WorkerShape)
    gear: Gear = field(default_factory=role_gear)
    drain_seconds: float = DRAIN_SECONDS
    """Of a replica, before what still runs there goes on elsewhere."""

    convertible: bool = False
    refusal_factor: float = 0.0
    """Refuse early when the predicted TTFT is over so many times the objective. 0: never."""

    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    tick_seconds: float = TICK_SECONDS
    """Between two calls of the law. Live it is called each second."""


@dataclass(slots=True)
class Outcome:
    jobs: list[Job]
    gaps: Gaps
    moves: int
    move_seconds: list[float]
    splits: list[tuple[float, int, int, int]]
    """(time, prefill serving, decode serving, prefill target) at each tick."""

    ended_at: float
    preemptions: int
    handed_on: int
    """Requests that the end of a drain sent to another worker, each time counted."""


class Cluster:
    """Runs one replay. Not reusable."""

    def __init__(self, setup: Setup, make_worker: MakeWorker) -> None:
        self.setup = setup
        self.gaps = Gaps()
        shape = setup.shape
        self.workers = [make_worker(i, setup.model, shape, setup.tpot_seconds, self) for i in range(setup.workers)]
        self.fleet = Fleet(self.workers, setup.start_prefill, setup.gear, setup.drain_seconds, self._hand_on)
        self._routing = Routing(
            setup.model, shape, setup.ttft_seconds, setup.tpot_seconds, setup.convertible, setup.refusal_factor
        )
        self._velocity = shape.max_batched_tokens / max(setup.model.prefill_seconds(shape.max_batched_tokens), 1e-9)
        self._events: list[tuple[float, int, int, Job | None]] = []
        """(time, serial, worker, job): job None is a step's end, else a read's end at that worker."""
        self._serial = 0
        self._wake = [-1] * setup.workers
        """Serial of each worker's current wish; others are void."""
        self._egress = [0.0] * setup.workers
        self._ingress = [0.0] * setup.workers
        """When each link has sent or received what was begun."""
        self._handed: dict[int, Job] = {}
        """Requests between their two legs, by number: their KV lies on `held_by`, or is lost (below 0)."""
        self._reading: dict[int, tuple[int, int]] = {}
        """(serial of its end, worker) of each one's read; others are void."""
        self._handed_on = 0
        self._turn = 0
        self._jobs: list[Job] = []
        self._rng = random.Random(setup.seed)
        # For the law.
        self._seconds: list[list[int]] = []
        self._reported = 0
        self._finished = 0
        self._refused = 0
        self._missed_ttft = 0
        self._missed_tpot = 0
        self._missed_in = dict.fromkeys(names.MISSED_IN, 0)
        self._output_of_prefill = 0
        self._recent: deque[tuple[float, float, float]] = deque()
        self._late: deque[Observation] = deque()
        self._last: Observation | None = None

    # Listener.

    def wake(self, worker: Worker, at: float) -> None:
        self._serial += 1
        self._wake[worker.index] = self._serial
        heapq.heappush(self._events, (at, self._serial, worker.index, None))

    def prefilled(self, worker: Worker, job: Job, now: float) -> None:
        self._output_of_prefill += 1
        job.held_by = worker.index
        self._handed[job.number] = job
        self._decoder(job).submit_pull(job, now)

    def pulls(self, worker: Worker, job: Job, now: float) -> None:
        source, sink, job.read_at = job.held_by, worker.index, now
        end = now
        if source not in (sink, -1):
            # One read at a time on a link, at its full rate: as many bytes a second as reads that share it.
            begin = max(now, self._egress[source], self._ingress[sink])
            end = begin + self.setup.model.handoff_seconds(job.prompt)
        if source >= 0:
            self._egress[source] = self._ingress[sink] = end
        self._ends_reading(job, sink, end)

    def _ends_reading(self, job: Job, sink: int, at: float) -> None:
        self._serial += 1
        self._reading[job.number] = self._serial, sink
        heapq.heappush(self._events, (at, self._serial, sink, job))

    def _decoder(self, job: Job) -> Worker:
        self._turn += 1
        chosen = self._routing.decode(self.fleet.decodes or self.workers, job.known, self._turn)
        assert chosen is not None
        return self.workers[chosen]

    def finished(self, worker: Worker, job: Job, now: float) -> None:
        self._finished += 1
        ttft = job.first - job.arrived
        tpot = (job.last - job.first) / (job.output - 1) if job.output > 1 else 0.0
        if ttft > self.setup.ttft_seconds:
            # The first token is the prefill's last step: all before it is that worker's queue and its own time.
            self._missed_ttft += 1
            self._missed_in["prefill"] += 1
        elif tpot > self.setup.tpot_seconds:
            self._missed_tpot += 1
            held_without_reads = job.last - job.first - job.reading <= self.setup.tpot_seconds * (job.output - 1)
            self._missed_in["transfer" if held_without_reads else "decode"] += 1
        self._recent.append((now, ttft, tpot))

    # The loop.

    def run(self, trace: Trace, decide: Decide | None = None) -> Outcome:
        events = self._events
        splits: list[tuple[float, int, int, int]] = []
        upcoming = iter(trace)
        arrival = next(upcoming, None)
        limit = trace[-1].at + PATIENCE_SECONDS
        horizon = trace[-1].at
        tick = self.setup.tick_seconds
        second = 1.0
        now = 0.0
        while arrival is not None or events:
            at = arrival.at if arrival is not None else float("inf")
            event_at = events[0][0] if events else float("inf")
            nearest = min(at, event_at)
            if nearest > limit:
                break
            if second <= nearest:
                now = second
                self.fleet.advance(now)
                if now >= tick - 1e-9:
                    prefill, _ = self.fleet.targets()
                    splits.append((now, len(self.fleet.prefills), len(self.fleet.decodes), prefill))
                    if decide is not None and now <= horizon + self.setup.tick_seconds:
                        self._tick(decide, now)
                    tick += self.setup.tick_seconds
                second += 1.0
                continue
            if arrival is not None and at <= event_at:
                now = at
                self._arrive(now, arrival.prompt_tokens, arrival.output_tokens)
                arrival = next(upcoming, None)
                continue
            now, serial, index, job = heapq.heappop(events)
            worker = self.workers[index]
            if job is not None:
                if self._reading.get(job.number) == (serial, index):
                    self._read(worker, job, now)
            elif self._wake[index] == serial:
                worker.boundary(now)
        return Outcome(
            jobs=self._jobs,
            gaps=self.gaps,
            moves=self.fleet.moves,
            move_seconds=self.fleet.move_seconds,
            splits=splits,
            ended_at=max(now, horizon),
            preemptions=sum(w.preemptions for w in self.workers),
            handed_on=self._handed_on,
        )

    def _read(self, worker: Worker, job: Job, now: float) -> None:
        del self._reading[job.number], self._handed[job.number]
        job.reading += now - job.read_at
        if job.held_by < 0:
            worker.pull_lost(job, now)
            return
        self.workers[job.held_by].release(job, now)
        worker.pulled(job, now)

    def _arrive(self, now: float, prompt: int, output: int) -> None:
        job = Job(len(self._jobs), now, prompt, output)
        self._jobs.append(job)
        while len(self._seconds) <= int(now):
            self._seconds.append([0, 0])
        self._seconds[int(now)][0] += 1
        self._seconds[int(now)][1] += prompt
        if prompt + output > self.setup.model.kv_capacity_tokens:
            self._refuse(job, now)
            return
        chosen = self._prefiller(self._routing, prompt)
        if chosen is None or not self.workers[chosen[0]].submit(job, now, hold=chosen[1]):
            self._refuse(job, now)

    def _prefiller(self, routing: Routing, prompt: int) -> tuple[int, bool] | None:
        self._turn += 1
        return routing.prefill(self.fleet.prefills, self.fleet.decodes, prompt, self._velocity, self._turn)

    def _refuse(self, job: Job, now: float) -> None:
        job.refused = True
        self._refused += 1
        self._missed_ttft += 1
        self._missed_in["prefill"] += 1

    def _hand_on(self, worker: Worker, now: float) -> None:
        """A drain is over: what is left goes on elsewhere, as the router has it when a worker breaks answers off."""
        self._wake[worker.index] = -1
        leaving = worker.evict(now)
        self._handed_on += len(leaving)
        for job in self._handed.values():
            if job.held_by == worker.index:
                job.held_by, job.spoke = -1, job.first
        for job in leaving:
            self._go_on(job, now)
        for number, (_, sink) in list(self._reading.items()):
            if self._handed[number].held_by < 0:
                self._ends_reading(self._handed[number], sink, now)

    def _go_on(self, job: Job, now: float) -> None:
        self._reading.pop(job.number, None)
        handed = self._handed.get(job.number)
        if handed is not None and job.held_by >= 0:
            # No token of a decode worker is out: its KV can still be read.
            self._decoder(job).submit_pull(job, now)
            return
        self._handed.pop(job.number, None)
        if job.generated:
            job.spoke = job.spoke if job.spoke >= 0 else job.first
            self._decoder(job).submit(job, now, hold=False, placed=True)
            return
        # It was taken in once, and is not refused now.
        chosen = self._prefiller(replace(self._routing, refusal_factor=0.0), job.prompt)
        assert chosen is not None
        self.workers[chosen[0]].submit(job, now, hold=chosen[1], placed=True)

    # What the law sees.

    def _tick(self, decide: Decide, now: float) -> None:
        faults = self.setup.faults
        if not any(begin <= now < end for begin, end in faults.stale):
            self._late.append(self._observe(now))
        seen: Observation | None = None
        while self._late and self._late[0].taken_at <= now - faults.metric_lag_seconds:
            # Arrivals of observations that were passed over are not lost: they are in the series the source keeps.
            newer = self._late.popleft()
            seen = newer if seen is None else replace(newer, arrivals=seen.arrivals + newer.arrivals)
        if seen is None:
            if self._last is None:
                return
            seen = replace(self._last, arrivals=())
        self._last = seen
        prefill = decide(seen, now)
        if prefill is None or prefill == self.fleet.targets()[0]:
            return
        if faults.lost_writes and self._rng.random() < faults.lost_writes:
            return
        self.fleet.retarget(prefill, now)

    def _observe(self, now: float) -> Observation:
        while len(self._seconds) < int(now):
            self._seconds.append([0, 0])
        arrivals = tuple(
            Arrivals(i + 1.0, self._seconds[i][0], self._seconds[i][1]) for i in range(self._reported, int(now))
        )
        self._reported = int(now)
        for worker in self.workers:
            worker.settle(now)
        recent = self._recent
        while recent and recent[0][0] < now - LATENCY_WINDOW_SECONDS:
            recent.popleft()
        ttfts = sorted(ttft for _, ttft, _ in recent)
        tpots = sorted(tpot for _, _, tpot in recent)
        rank = int(0.95 * len(recent))
        return Observation(
            taken_at=now,
            arrivals=arrivals,
            generated_tokens=self._output_of_prefill + sum(w.generated for w in self.workers),
            finished=self._finished,
            refused=self._refused,
            missed_ttft=self._missed_ttft,
            missed_tpot=self._missed_tpot,
            missed_in=MissedIn.of(self._missed_in),
            ttft_p95_seconds=ttfts[rank] if ttfts else None,
            tpot_p95_seconds=tpots[rank] if tpots else None,
            workers=tuple(self._load(index) for index in range(len(self.workers))),
        )

    def _load(self, index: int) -> WorkerLoad:
        member = self.fleet.members[index]
        worker = member.worker
        return WorkerLoad(
            name=str(index),
            role=member.role,
            target=member.target,
            queued_prefill_tokens=worker.queued_tokens,
            requests=worker.in_flight,
            decoding=worker.decoding,
            waiting_pulls=worker.waiting_pulls,
            resident_tokens=worker.resident_tokens,
            free_tokens=worker.free_tokens,
            capacity_tokens=self.setup.model.kv_capacity_tokens,
            prefill_tokens=worker.prefilled_tokens,
            prefill_seconds=worker.prefill_seconds,
            busy_seconds=worker.busy_seconds,
            decode_seconds=worker.decode_seconds,
            decode_steps=worker.decode_steps,
            decode_batch=worker.decode_batch,
            decode_resident=worker.decode_resident,
        )
