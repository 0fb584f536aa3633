"""The best piecewise-constant schedule: knots each minute, every move at the gear's cost. A lower bound of the optimum.

A dynamic programme over minutes and splits gives the first schedule: a minute's cost under a split is what requests
arriving in it missed in the replay of that fixed split, and a move costs the worse of the two splits for as long as a
worker is out. The schedule is then replayed for real, and changed knot by knot while that helps, within a budget of
replays. It knows the future; no law can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, MakeWorker, Outcome, Setup
from forebay_operator.replay.trace import Trace

KNOT_SECONDS = 60.0
REFINE_REPLAYS = 6


class Scheduled:
    """The law that follows a schedule of prefill workers, one entry a minute."""

    def __init__(self, schedule: list[int]) -> None:
        self._schedule = schedule

    def __call__(self, observation: Observation, now: float) -> int | None:
        # The tick at the end of a minute sets the split of the next one.
        return self._schedule[min(len(self._schedule) - 1, int((now + 1e-9) // KNOT_SECONDS))]


@dataclass(frozen=True, slots=True)
class Found:
    schedule: list[int]
    missed: int


@dataclass(frozen=True, slots=True)
class Replayed:
    schedule: list[int]
    minutes: list[int]
    """Requests that missed, by the minute of their arrival."""

    @property
    def missed(self) -> int:
        return sum(self.minutes)


def minutes_missed(outcome: Outcome, setup: Setup) -> list[int]:
    """Requests that missed an objective, by the minute of their arrival."""
    counts = [0] * (int(outcome.jobs[-1].arrived // KNOT_SECONDS) + 1)
    for job in outcome.jobs:
        tpot = (job.last - job.first) / (job.output - 1) if job.output > 1 else 0.0
        good = job.last >= 0 and job.first - job.arrived <= setup.ttft_seconds and tpot <= setup.tpot_seconds
        counts[int(job.arrived // KNOT_SECONDS)] += not good
    return counts


class Oracle:
    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        make_worker: MakeWorker,
        refine: int = REFINE_REPLAYS,
        fixed_missed: dict[int, list[int]] | None = None,
    ) -> None:
        """`fixed_missed`: minutes_missed() of every fixed split, by prefill workers, where they were replayed before;
        they do not depend on the gear."""
        self._trace = trace
        self._setup = setup
        self._make = make_worker
        self._refine = refine
        self._fixed_missed = fixed_missed
        self._knots = int(trace[-1].at // KNOT_SECONDS) + 1

    def search(self) -> Found:
        """At least as good as the best fixed split."""
        missed = self._fixed_missed or {q: self._replayed([q]).minutes for q in range(1, self._setup.workers)}
        best = min((Replayed([q], counts) for q, counts in missed.items()), key=lambda r: r.missed)
        seen = {q: list(counts) for q, counts in missed.items()}
        tried = self._replayed(self._plan(seen))
        for _ in range(self._refine):
            if tried.missed < best.missed:
                best = tried
            schedule = self._plan(self._corrected(seen, tried))
            if schedule == tried.schedule:
                break
            tried = self._replayed(schedule)
            if tried.missed >= best.missed:
                break
        best = min(best, tried, key=lambda r: r.missed)
        return Found(best.schedule, best.missed)

    def _replayed(self, schedule: list[int]) -> Replayed:
        setup = replace(self._setup, start_prefill=schedule[0])
        outcome = Cluster(setup, self._make).run(self._trace, Scheduled(schedule))
        return Replayed(schedule, minutes_missed(outcome, setup))

    def _plan(self, missed: dict[int, list[int]]) -> list[int]:
        """The cheapest path. A move charges the worse split's misses for the share of minutes a worker is out."""
        splits = sorted(missed)
        out = max(1.0, self._setup.gear.seconds + (20.0 if self._setup.gear.drains else 0.0)) / KNOT_SECONDS
        arrivals = len(self._trace) / self._knots
        cost = {q: float(missed[q][0]) for q in splits}
        back: list[dict[int, int]] = []
        for minute in range(1, self._knots):
            step: dict[int, float] = {}
            chosen: dict[int, int] = {}
            for q in splits:
                options = {}
                for p in splits:
                    price = 0.0
                    if p != q:
                        worse = max(missed[p][minute], missed[q][minute]) - missed[q][minute]
                        price = min(1.0, out) * worse + max(0.0, out - 1.0) * 0.05 * arrivals + 0.001 * arrivals
                    options[p] = cost[p] + price
                chosen[q] = min(options, key=lambda p: (options[p], abs(p - q)))
                step[q] = options[chosen[q]] + missed[q][minute]
            cost = step
            back.append(chosen)
        end = min(cost, key=lambda q: cost[q])
        schedule = [end]
        for chosen in reversed(back):
            schedule.append(chosen[schedule[-1]])
        return schedule[::-1]

    def _corrected(self, missed: dict[int, list[int]], tried: Replayed) -> dict[int, list[int]]:
        """What its own minutes cost, where they differ from the fixed splits', goes half into the next plan."""
        for minute, count in enumerate(tried.minutes):
            costs = missed[tried.schedule[min(minute, len(tried.schedule) - 1)]]
            costs[minute] = (count + costs[minute]) // 2
        return missed
