"""From what routers and workers answered to one Observation: sums, increments, whole seconds, and how far to trust it.

Pure but for what it remembers between two looks. All times are the observer's own clock; what a source says of its own
times are ages, so that clocks which differ change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.decide.types import Workers
from forebay_operator.observe.fits import Capacity, Watched
from forebay_operator.observe.fleet import Fleet, Member
from forebay_operator.observe.missed import MissedIn
from forebay_operator.observe.router_report import ReportedWorker, RouterReport, Totals
from forebay_operator.observe.traffic import Arrivals, Health, Observation, Signal, WorkerLoad
from forebay_operator.observe.worker_counters import Page

PATIENCE_SECONDS: Final = 5.0
"""A source that is silent for less is late, not stale: nothing new is decided meanwhile, and nothing is said of it."""

FIRST_SECONDS: Final = 15.0
"""One that has never answered and can't be reached: an address that is wrong is told of soon. One that answers and
knows nothing yet has not scraped."""

LATE_SECONDS: Final = 0.02
MOST_SECONDS: Final = 60
"""Seconds of arrivals in one Observation; after a longer silence the older ones are left out."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a source gave nothing."""

    why: str
    invalid: bool = False
    """It answered, with what it may not say."""

    unreachable: bool = False
    """Nothing answers at its address, or nobody who lets us in."""


@dataclass(slots=True)
class _Router:
    known_since: float
    seen_at: float | None = None
    totals: Totals | None = None
    instance: str = ""
    samples: int = 0


class Assembler:
    def __init__(
        self,
        *,
        totals_source: str = "/load",
        fits_source: str = "/metrics",
        patience: float = PATIENCE_SECONDS,
        base: Totals | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        """`base`: totals of an observer before this one, from which counting goes on; `capacity`: what it learnt."""
        self.capacity = capacity or Capacity()
        self._totals_source = totals_source
        self._fits_source = fits_source
        self._patience = patience
        self._totals = Totals(missed_in=MissedIn()).plus(base or Totals())
        self._routers: dict[str, _Router] = {}
        self._watched: dict[str, Watched] = {}
        self._trouble: dict[str, str] = {}
        """Workers whose last page was of no use, and why."""

        self._uncached = 0
        """Uncached tokens not reported yet. Below 0: cached ones of prompts that were offered before."""

        self._requests = 0
        self._max_batch = 0
        self._begun_at: float | None = None
        self._taken_at: float | None = None
        self._last: Observation | None = None

    def look(
        self,
        fleet: Fleet,
        answers: Mapping[str, RouterReport | Unanswered],
        pages: Mapping[str, Page | Unanswered],
        now: float,
    ) -> Observation:
        """`answers` by router, one for each of the fleet's; `pages` by worker, of those that were read since."""
        if self._begun_at is None:
            self._begun_at = now
        signals, reset = self._hear(fleet, answers, now)
        reports = [answer for answer in answers.values() if isinstance(answer, RouterReport)]
        loads, unheard = _freshest(reports), not reports or len(reports) < len(fleet.routers)
        workers: list[WorkerLoad] = []
        for member in fleet.members:
            reported = loads.get(member.name)
            workers.append(self._worker(member, reported, now, pages.get(member.name)))
            signals += self._worker_signals(member, reported, now)
        names = {member.name for member in fleet.members}
        self._watched = {name: watched for name, watched in self._watched.items() if name in names}
        self._trouble = {name: why for name, why in self._trouble.items() if name in names}
        if unheard:
            if self._last is None:
                return Observation(taken_at=now, workers=tuple(workers), signals=tuple(signals))
            # What was wrong with the figures still is: a frozen worker's are no better for a router that fell silent.
            doubts = [s for s in self._last.signals if s.needed and s.health == Health.STALE]
            told = {signal.name for signal in doubts}
            return replace(self._last, arrivals=(), signals=(*doubts, *(s for s in signals if s.name not in told)))
        gone = self._gone(answers)
        self._totals = self._totals.plus(gone)
        observed = Observation(
            taken_at=now,
            arrivals=self._arrivals(gone, now),
            generated_tokens=self._totals.generated_tokens,
            finished=self._totals.finished,
            refused=self._totals.refused,
            missed_ttft=self._totals.missed_ttft,
            missed_tpot=self._totals.missed_tpot,
            # Of some routers only it would look like fewer misses.
            missed_in=self._totals.missed_in if all(r.totals.missed_in is not None for r in reports) else None,
            ttft_p95_seconds=max((r.ttft_p95_seconds for r in reports if r.ttft_p95_seconds is not None), default=None),
            tpot_p95_seconds=max((r.tpot_p95_seconds for r in reports if r.tpot_p95_seconds is not None), default=None),
            workers=tuple(workers),
            signals=(*signals, self._offered(gone, reset)),
        )
        self._taken_at, self._last = now, observed
        return observed

    def workers(self) -> Workers | None:
        """A worker's speed as learnt so far. Room and batch are those of the smallest worker that is known."""
        seen = [] if self._last is None else [w for w in self._last.workers if w.capacity_tokens > 0]
        if not seen:
            return None
        return self.capacity.workers(min(w.capacity_tokens for w in seen), self._max_batch or 256)

    # Routers.

    def _hear(
        self, fleet: Fleet, answers: Mapping[str, RouterReport | Unanswered], now: float
    ) -> tuple[list[Signal], bool]:
        self._routers = {name: self._routers.get(name) or _Router(now) for name in fleet.routers}
        if not fleet.routers:
            note = "no router is ready to be asked"
            return [Signal("routers", self._totals_source, Health.MISSING, note=note)], False
        signals, reset = [], False
        for name, router in self._routers.items():
            answer = answers.get(name) or Unanswered("it was not asked")
            label = f"router {name}"
            if isinstance(answer, RouterReport):
                anew = router.totals is not None and (
                    answer.instance != router.instance or answer.totals.since(router.totals) is None
                )
                reset |= anew
                router.seen_at, router.samples = now, router.samples + 1
                health, note = (Health.RESET, "it started anew") if anew else (Health.FRESH, "")
                signals.append(Signal(label, self._totals_source, health, 0.0, router.samples, note=note))
                continue
            silent = now - (router.known_since if router.seen_at is None else router.seen_at)
            health = Health.INVALID if answer.invalid else Health.STALE if router.seen_at else Health.MISSING
            age = None if router.seen_at is None else silent
            soon = answer.unreachable and router.seen_at is None
            late = silent <= (min(self._patience, FIRST_SECONDS) if soon else self._patience)
            note = f"no use for {silent:.0f} s: {answer.why}"
            signals.append(Signal(label, self._totals_source, health, age, router.samples, not late, note))
        return signals, reset

    def _gone(self, answers: Mapping[str, RouterReport | Unanswered]) -> Totals:
        """What all routers counted since they were asked last."""
        total = Totals()
        for name, router in self._routers.items():
            answer = answers[name]
            assert isinstance(answer, RouterReport)
            held, router.totals = router.totals, answer.totals
            same = answer.instance == router.instance
            router.instance = answer.instance
            if held is None:
                # What it counted before we looked belongs to no second that we know.
                continue
            gone = answer.totals.since(held) if same else None
            # A process that is new since the last look has counted all it has since then.
            total = total.plus(answer.totals if gone is None else gone)
        return total

    def _arrivals(self, gone: Totals, now: float) -> tuple[Arrivals, ...]:
        """What was offered since the last look, spread over the whole seconds that ended since."""
        self._requests += gone.offered_requests
        self._uncached += gone.offered_tokens - gone.cached_tokens
        if self._taken_at is None:
            return ()
        first, last = math.floor(self._taken_at) + 1, math.floor(now)
        seconds = last - first + 1
        if seconds < 1:
            return ()
        requests, tokens = self._requests, max(0, self._uncached)
        self._requests, self._uncached = 0, self._uncached - tokens
        return tuple(
            Arrivals(float(first + i), _share(requests, i, seconds), _share(tokens, i, seconds))
            for i in range(max(0, seconds - MOST_SECONDS), seconds)
        )

    def _offered(self, gone: Totals, reset: bool) -> Signal:
        health = Health.RESET if reset else Health.FRESH if gone.offered_requests else Health.ZERO
        samples = sum(router.samples for router in self._routers.values())
        return Signal("offered load", self._totals_source, health, 0.0, samples)

    # Workers.

    def _worker(
        self, member: Member, reported: ReportedWorker | None, now: float, page: Page | Unanswered | None
    ) -> WorkerLoad:
        role = _role(member, reported)
        load = None if reported is None else reported.load
        if reported is None or load is None:
            return WorkerLoad(name=member.name, role=None, target=member.target)
        watched = self._watch(member.name, load.engine_id, role, now)
        if isinstance(page, Page):
            self._trouble.pop(member.name, None)
            gone = watched.look(page, now)
            if gone is not None:
                self.capacity.add(gone)
        elif page is not None:
            self._trouble[member.name] = page.why
        self._max_batch = load.max_running or self._max_batch
        alive = reported.serving or reported.state == "draining"
        credited = watched.credited
        return WorkerLoad(
            name=member.name,
            role=role,
            target=member.target,
            # Of a dead worker nothing runs any more: its requests go on elsewhere.
            queued_prefill_tokens=load.queued_prefill_tokens if alive else 0,
            requests=load.running + load.waiting + load.waiting_pulls if alive else 0,
            decoding=load.decoding if alive else 0,
            waiting_pulls=load.waiting_pulls if alive else 0,
            resident_tokens=load.resident_decode_tokens if alive else 0,
            free_tokens=load.free_blocks * load.block_size,
            capacity_tokens=load.total_blocks * load.block_size,
            prefill_tokens=round(credited.prompt_tokens),
            prefill_seconds=credited.prompt_seconds,
            busy_seconds=credited.busy_seconds,
            decode_seconds=credited.decode_seconds,
            decode_steps=round(credited.decode_steps),
            decode_batch=round(credited.decode_sequences),
            decode_resident=round(credited.decode_resident),
        )

    def _watch(self, name: str, engine_id: str, role: Pool | None, now: float) -> Watched:
        watched = self._watched.get(name)
        if watched is None:
            # Those that were there when we came have run for who knows how long.
            young = self._begun_at is not None and now > self._begun_at
            watched = self._watched[name] = Watched(engine_id, role, now, cold=young)
        elif watched.engine_id != engine_id:
            watched.restarted(engine_id, now)
        watched.in_role(role)
        return watched

    def _worker_signals(self, member: Member, reported: ReportedWorker | None, now: float) -> list[Signal]:
        label, watched = f"worker {member.name}", self._watched.get(member.name)
        serving = _role(member, reported) is not None
        age = None if reported is None else reported.age_seconds
        looks = 0 if watched is None else watched.looks
        if reported is None or reported.load is None or age is None:
            health, note = Health.MISSING, "no router has a report of it"
        elif age > self._patience:
            health, note = Health.STALE, f"its last report is {age:.0f} s old and routers still send to it"
        else:
            health, note = Health.FRESH if reported.load.running else Health.ZERO, ""
        signals = [Signal(f"{label} load", self._totals_source, health, age, looks, serving, note)]
        if watched is not None:
            looked = watched.looked_at
            fits = Health.COLD if watched.cold(now) else Health.MISSING if looked is None else Health.FRESH
            trouble = self._trouble.get(member.name, "")
            if trouble:
                fits = Health.INVALID
            since = None if looked is None else now - looked
            signals.append(Signal(f"{label} fits", self._fits_source, fits, since, looks, False, trouble))
        return signals


def until_next_look(now: float) -> float:
    """Seconds to wait. Arrivals are told by whole seconds: a look just after the end of one sees it a second sooner
    than one just before."""
    return 1.0 - now % 1.0 + LATE_SECONDS


def _freshest(reports: list[RouterReport]) -> dict[str, ReportedWorker]:
    found: dict[str, ReportedWorker] = {}
    for report in reports:
        for worker in report.workers:
            held = found.get(worker.name)
            if held is None or _age(worker) < _age(held):
                found[worker.name] = worker
    return found


def _age(worker: ReportedWorker) -> float:
    return math.inf if worker.age_seconds is None else worker.age_seconds


def _role(member: Member, reported: ReportedWorker | None) -> Pool | None:
    """What routers use it for now."""
    if reported is None or not member.serving or not reported.serving:
        return None
    return next((pool for pool in POOLS if pool == reported.role), None)


def _share(whole: int, part: int, parts: int) -> int:
    """The `part`-th of `parts` near equal whole shares: they make `whole` together."""
    return whole * (part + 1) // parts - whole * part // parts
