"""The best schedule that a bounded search finds with the future known: a lower bound of the optimum.

It begins with the schedules of others: every fixed split, and what laws did on this trace, at knots each minute and,
where that is better, tick by tick. A dynamic programme over minutes and splits adds one of its own: a minute's cost
under a split is what requests arriving in it missed in the replay of that fixed split, and a move costs the worse of
the two splits for as long as a worker is out. The best is then changed where it misses most, while that helps. Every
schedule is judged by a replay at the gear's cost; their number is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, Decide, MakeWorker, Outcome, Setup
from forebay_operator.replay.trace import Trace

KNOT_SECONDS = 60.0
PLAN_REPLAYS = 6
"""Of the dynamic programme, each corrected by the replay of the one before."""

CHANGE_REPLAYS = 16
WORST_MINUTES = 8
"""Around which changes are tried, the worst first."""


class Scheduled:
    """The law that follows a schedule of prefill workers, one entry for each `seconds`."""

    def __init__(self, schedule: list[int], seconds: float = KNOT_SECONDS) -> None:
        self._schedule = schedule
        self._seconds = seconds

    def __call__(self, observation: Observation, now: float) -> int | None:
        # The tick at the end of an entry sets the split of the next one.
        return self._schedule[min(len(self._schedule) - 1, int((now + 1e-9) // self._seconds))]


@dataclass(frozen=True, slots=True)
class Found:
    schedule: list[int]
    seconds: float
    """Of an entry: KNOT_SECONDS, or the law's tick where the best schedule came from a law's own run."""

    missed: int
    replays: int
    """That the search took, without fixed splits that were known."""


@dataclass(frozen=True, slots=True)
class Replayed:
    schedule: list[int]
    """Each tick."""

    minutes: list[int]
    """Requests that missed, by the minute of their arrival."""

    lean: list[int]
    """Of these, those that missed TTFT less those that missed TPOT only: above 0 wants more prefill workers."""

    @property
    def missed(self) -> int:
        return sum(self.minutes)


def minutes_missed(outcome: Outcome, setup: Setup) -> list[int]:
    """Requests that missed an objective, by the minute of their arrival."""
    late, slow = _by_objective(outcome, setup)
    return [a + b for a, b in zip(late, slow, strict=True)]


def _by_objective(outcome: Outcome, setup: Setup) -> tuple[list[int], list[int]]:
    """By the minute of arrival: requests that missed TTFT, refused and unfinished ones too, and TPOT only."""
    minutes = int(outcome.jobs[-1].arrived // KNOT_SECONDS) + 1
    late, slow = [0] * minutes, [0] * minutes
    for job in outcome.jobs:
        minute = int(job.arrived // KNOT_SECONDS)
        tpot = (job.last - job.first) / (job.output - 1) if job.output > 1 else 0.0
        if job.last < 0 or job.first - job.arrived > setup.ttft_seconds:
            late[minute] += 1
        elif tpot > setup.tpot_seconds:
            slow[minute] += 1
    return late, slow


class Oracle:
    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        make_worker: MakeWorker,
        *,
        laws: Mapping[str, Callable[[], Decide]] | None = None,
        plans: int = PLAN_REPLAYS,
        changes: int = CHANGE_REPLAYS,
        fixed_missed: dict[int, list[int]] | None = None,
    ) -> None:
        """`laws`: whose schedules to begin with, each made anew. `plans`, `changes`: replays at most.

        `fixed_missed`: minutes_missed() of every fixed split, by prefill workers, where they were replayed before;
        they do not depend on the gear.
        """
        self._trace = trace
        self._setup = setup
        self._make = make_worker
        self._laws = laws or {}
        self._plans = plans
        self._changes = changes
        self._fixed_missed = fixed_missed
        self._knots = int(trace[-1].at // KNOT_SECONDS) + 1
        self._per_knot = max(1, round(KNOT_SECONDS / setup.tick_seconds))
        self._tried: dict[tuple[int, ...], Replayed] = {}
        self._replays = 0

    def search(self) -> Found:
        """At least as good as every fixed split and every law's schedule at its knots; where no writes are lost, also
        as every law's own run.

        At most (workers - 1) + 3 for each law + 1 + plans + changes replays.
        """
        missed = self._fixed_missed or {q: self._try(self._wide([q])).minutes for q in range(1, self._setup.workers)}
        for q, counts in missed.items():
            self._tried.setdefault(tuple(self._wide([q])), Replayed(self._wide([q]), counts, [0] * len(counts)))
        best = min(self._tried.values(), key=lambda r: r.missed)
        for make in self._laws.values():
            best = self._follow(make(), best)
        best = self._changed(self._planned(missed, best))
        knots = best.schedule[:: self._per_knot]
        if self._wide(knots) == best.schedule:
            return Found(knots, KNOT_SECONDS, best.missed, self._replays)
        return Found(best.schedule, self._setup.tick_seconds, best.missed, self._replays)

    def _wide(self, knots: list[int]) -> list[int]:
        """Each tick, of a schedule with an entry each minute whose last one stays."""
        return [knots[min(i, len(knots) - 1)] for i in range(self._knots) for _ in range(self._per_knot)]

    def _try(self, schedule: list[int]) -> Replayed:
        key = tuple(schedule)
        if key not in self._tried:
            setup = replace(self._setup, start_prefill=schedule[0])
            self._tried[key], _ = self._replayed(setup, schedule, Scheduled(schedule, setup.tick_seconds))
        return self._tried[key]

    def _replayed(self, setup: Setup, schedule: list[int], law: Decide) -> tuple[Replayed, Outcome]:
        self._replays += 1
        outcome = Cluster(setup, self._make).run(self._trace, law)
        late, slow = _by_objective(outcome, setup)
        minutes = [a + b for a, b in zip(late, slow, strict=True)]
        return Replayed(schedule, minutes, [a - b for a, b in zip(late, slow, strict=True)]), outcome

    def _follow(self, law: Decide, best: Replayed) -> Replayed:
        """The better of `best` and what `law` did, at knots or as it was."""
        run, outcome = self._replayed(self._setup, [], law)
        length = self._knots * self._per_knot
        targets = [target for _, _, _, target in outcome.splits][:length] or [self._setup.start_prefill]
        targets += [targets[-1]] * (length - len(targets))
        best = min(best, self._try(self._wide(targets[:: self._per_knot])), key=lambda r: r.missed)
        if run.missed < best.missed:
            # Replayed as a schedule, for writes that were lost then may not be now.
            best = min(best, self._try(targets), key=lambda r: r.missed)
        return best

    def _planned(self, missed: dict[int, list[int]], best: Replayed) -> Replayed:
        seen = {q: list(counts) for q, counts in missed.items()}
        tried = self._try(self._wide(self._plan(seen)))
        for _ in range(self._plans):
            best = min(best, tried, key=lambda r: r.missed)
            schedule = self._wide(self._plan(self._corrected(seen, tried)))
            if schedule == tried.schedule:
                break
            before, tried = tried, self._try(schedule)
            if tried.missed >= before.missed:
                break
        return min(best, tried, key=lambda r: r.missed)

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
            costs = missed[tried.schedule[min(minute * self._per_knot, len(tried.schedule) - 1)]]
            costs[minute] = (count + costs[minute]) // 2
        return missed

    def _changed(self, best: Replayed) -> Replayed:
        """Changed around its worst minutes, one change after another, while replays are left."""
        until = self._replays + self._changes
        better: Replayed | None = best
        while better is not None:
            best, better = better, None
            for schedule in self._near(best):
                if tuple(schedule) in self._tried:
                    continue
                if self._replays >= until:
                    return best
                tried = self._try(schedule)
                if tried.missed < best.missed:
                    better = tried
                    break
        return best

    def _near(self, best: Replayed) -> Iterator[list[int]]:
        """Schedules that differ where most is missed: one worker more or fewer, and moves a minute earlier or later."""
        worst = sorted((m for m, count in enumerate(best.minutes) if count), key=lambda m: -best.minutes[m])
        held = best.schedule
        for minute in worst[:WORST_MINUTES]:
            step = 1 if best.lean[minute] >= 0 else -1
            at = minute * self._per_knot
            begin, end = at, at + self._per_knot
            first, last = begin, end
            while first > 0 and held[first - 1] == held[at]:
                first -= 1
            while last < len(held) and held[last] == held[at]:
                last += 1
            before = max(0, begin - self._per_knot)
            for by in (step, -step):
                for low, high in ((before, end), (first, last), (begin, last)):
                    yield self._shifted(held, low, high, by)
            if first > 0:
                yield _filled(held, first - self._per_knot, first, held[at])
                yield _filled(held, first, first + self._per_knot, held[first - 1])
            if last < len(held):
                yield _filled(held, last - self._per_knot, last, held[last])
                yield _filled(held, last, last + self._per_knot, held[at])

    def _shifted(self, held: list[int], low: int, high: int, by: int) -> list[int]:
        most = self._setup.workers - 1
        return [min(most, max(1, q + by)) if low <= i < high else q for i, q in enumerate(held)]


def _filled(held: list[int], low: int, high: int, value: int) -> list[int]:
    return [value if low <= i < high else q for i, q in enumerate(held)]
