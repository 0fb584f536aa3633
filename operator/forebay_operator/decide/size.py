"""How many workers there should be: growing and shrinking the total. Pure.

The split of the workers that are there is value.py's; this decides the replicas of the two home pools. The rules, in
order, each with its reason:

    a pod that stays Pending is given up       the pool goes back to what is ready, and backs off
    demand does not fit the workers            grow the pool that is shorter, within bounds, GPUs and rate
    pods are starting or ending                shrink nothing: one pool at a time
    demand fits one worker less, with margin   shrink the pool with more to spare, by one

Demand is in workers' worth of load (estimate.py). A role needs ceil(demand / TARGET) workers; the tolerance makes the
need for growing a little smaller and the need for keeping a little larger: a dead band.
"""

from __future__ import annotations

import math
from typing import Literal

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.decide import reasons
from forebay_operator.decide.memory import Need, Sized, SizeMemory
from forebay_operator.decide.project import feasible
from forebay_operator.decide.types import Bounds, Fleet, Growth, Rules, Sizing, Split

TARGET = 0.8
"""Utilisation to size for: prompts wait two service times at 0.8 and 4.5 at 0.9 (M/D/1); decode keeps a fifth of its
batch for what it cannot see coming."""

UP_SECONDS = 60.0
DOWN_SECONDS = 300.0
"""Stabilisation windows when the spec sets none. Down is HPA's; longer where two starts take longer."""

TOLERANCE = 0.1
"""HPA's."""

BACK_OFF_SECONDS = 300.0
BACK_OFF_MOST = 3600.0
REVERSAL_SECONDS = 1800.0
"""A change that undoes one of this age or less counts as a reversal; each doubles the next one's window."""

MOST_DOUBLINGS = 3
WINDOW_MOST = 3600.0
GAP_SECONDS = 60.0
"""Needs that were seen longer ago than this do not join those of now: the window starts again."""

Way = Literal["up", "down"]


def sized(
    fleets: dict[Pool, Fleet],
    demand: tuple[float, float],
    serving: Split,
    bounds: Bounds,
    growth: Growth,
    pause: Literal["None", "All", "ScaleUp", "ScaleDown"],
    explained: bool,
    memory: SizeMemory,
    now: float,
) -> tuple[Sizing, SizeMemory]:
    """`demand`: workers' worth of (prefill, decode) load. `serving`: workers by role, wherever their home is.

    `pause` ScaleUp keeps the total from growing, ScaleDown from shrinking. `explained`: the misses that are measured
    are those that demand explains; else nothing shrinks. The memory given is not changed.
    """
    call = _Call(fleets, demand, serving, bounds, growth, pause, explained, memory.next(), now)
    found = call.decide()
    call.note(found)
    return found, call.memory


class _Call:
    def __init__(
        self,
        fleets: dict[Pool, Fleet],
        demand: tuple[float, float],
        serving: Split,
        bounds: Bounds,
        growth: Growth,
        pause: str,
        explained: bool,
        memory: SizeMemory,
        now: float,
    ) -> None:
        self.fleets = fleets
        self.demand = demand
        self.serving = serving
        self.bounds = bounds
        self.growth = growth
        self.pause = pause
        self.explained = explained
        self.memory = memory
        self.now = now
        self.before = Split(fleets["prefill"].wanted, fleets["decode"].wanted)

    def decide(self) -> Sizing:
        stuck = self._stuck()
        if stuck is not None:
            return stuck
        grow, keep = self._need(self._tolerance(self.growth.up)), self._need(-self._tolerance(self.growth.down))
        self._remember(grow, keep)
        if grow.total > self.before.total:
            return self._grow(grow)
        if keep.total < self.before.total:
            return self._changing() or self._shrink(keep)
        return self._hold(reasons.FITS, f"{self._demands()} fits {self.before}, and would not fit one worker less")

    def note(self, found: Sizing) -> None:
        """Remember a change, and whether it undoes an earlier one."""
        change = found.target.total - found.before.total
        if not change:
            return
        memory = self.memory
        last = memory.changes[-1] if memory.changes else None
        if found.reason != reasons.PENDING_UNDONE and last is not None and (last.workers > 0) != (change > 0):
            recent = self.now - last.at <= REVERSAL_SECONDS
            memory.reversals = min(MOST_DOUBLINGS, memory.reversals + 1) if recent else 0
        memory.changes = [c for c in memory.changes if c.at > self.now - REVERSAL_SECONDS] + [Sized(self.now, change)]

    # Rules.

    def _stuck(self) -> Sizing | None:
        """A pod that never becomes ready must not freeze the loop: its pool goes back to what works, and backs off."""
        target, oldest = self.before, self.now
        for pool in POOLS:
            fleet = self.fleets[pool]
            since = fleet.pending_since
            works = max(fleet.ready, self._least(pool))
            if since is not None and self.now - since >= self.growth.pending_seconds and fleet.wanted > works:
                target, oldest = target._replace(**{pool: works}), min(oldest, since)
        if target != self.before:
            self.memory.failures += 1
            wait = min(BACK_OFF_MOST, BACK_OFF_SECONDS * 2 ** (self.memory.failures - 1))
            self.memory.blocked_until = self.now + wait
            return self._to(
                target,
                reasons.PENDING_UNDONE,
                f"a pod has been Pending for {self.now - oldest:.0f} s, at most {self.growth.pending_seconds:g} s are "
                f"waited; back to {target}, and no growth for {wait:g} s",
            )
        grew = bool(self.memory.changes) and self.memory.changes[-1].workers > 0
        if grew and all(fleet.ready >= fleet.wanted for fleet in self.fleets.values()):
            self.memory.failures = 0
        return None

    def _changing(self) -> Sizing | None:
        """Nothing shrinks while anything starts or ends: what is on its way counts as there, what leaves as gone."""
        for pool in POOLS:
            fleet = self.fleets[pool]
            if fleet.terminating:
                return self._hold(
                    reasons.TERMINATING,
                    f"{fleet.terminating} pods of the {pool} pool are leaving; the next one waits for them",
                )
            if fleet.ready < fleet.wanted:
                return self._hold(
                    reasons.STARTING, f"{fleet.wanted - fleet.ready} pods of the {pool} pool are starting"
                )
        return None

    def _grow(self, need: Split) -> Sizing:
        message = f"{self._demands()} needs {need.total} workers at {TARGET:.0%} use and there are {self.before.total}"
        if self.pause in ("All", "ScaleUp"):
            return self._hold(reasons.PAUSED, f"scaling.pause is {self.pause}: {message}", reasons.LIMITED_BY_PAUSE)
        if self.now < self.memory.blocked_until:
            left = self.memory.blocked_until - self.now
            return self._hold(
                reasons.BACKING_OFF, f"{message}; pods stayed Pending, no growth for another {left:.0f} s"
            )
        window = self._window("up")
        if not self._full(window) or (wanted := min(n.grow for n in self._within(window))) <= self.before.total:
            return self._hold(reasons.STABILIZING, f"{message}, but not for {window:g} s yet")
        step = min(need.total, wanted) - self.before.total
        allowed = self._allowed("up")
        limited = [reasons.LIMITED_BY_RATE] if allowed < step else []
        target, stops = self._grown(need, min(step, allowed))
        limited += [limit for limit in stops if limit not in limited]
        if target == self.before:
            return self._hold(reasons.AT_MOST, f"{message}; no more are allowed now", *limited)
        return self._to(target, reasons.SHORT, message, *limited)

    def _grown(self, need: Split, step: int) -> tuple[Split, list[str]]:
        """Counts with `step` workers more, and what stops at fewer. A total that the ratio can't split is passed."""
        target = reached = self.before
        short = {"prefill": need.prefill - self.serving.prefill, "decode": need.decode - self.serving.decode}
        for _ in range(step):
            # Of two equally short pools decode grows: its shortage is a cliff, prefill's can be absorbed.
            order = sorted(POOLS, key=lambda pool: (-short[pool], pool))
            ways: list[tuple[Pool, tuple[str, ...]]] = []
            for pool in order:
                ways.append((pool, self._broken(self._step(target, pool, 1))))
                if not ways[-1][1]:
                    break
            free = [way for way in ways if not way[1]] or [way for way in ways if way[1] == (reasons.LIMITED_BY_RATIO,)]
            if not free:
                return reached, list(ways[0][1])
            grown, broken = free[0]
            target = self._step(target, grown, 1)
            short[grown] -= 1
            if not broken:
                reached = target
        return reached, [] if reached == target else [reasons.LIMITED_BY_RATIO]

    def _shrink(self, need: Split) -> Sizing:
        message = f"{self._demands()} fits {self.before.total - 1} workers of {self.before.total} with a margin"
        if self.pause in ("All", "ScaleDown"):
            return self._hold(reasons.PAUSED, f"scaling.pause is {self.pause}: {message}", reasons.LIMITED_BY_PAUSE)
        if not self.explained:
            return self._hold(reasons.UNEXPLAINED, f"{message}, but more requests miss than that explains")
        window = self._window("down")
        if not self._full(window) or max(n.keep for n in self._within(window)) >= self.before.total:
            return self._hold(reasons.STABILIZING, f"{message}, but not for {window:g} s yet")
        if self._allowed("down") < 1:
            return self._hold(reasons.STABILIZING, f"{message}; scaleDown allows none now", reasons.LIMITED_BY_RATE)
        spare = {"prefill": self.serving.prefill - need.prefill, "decode": self.serving.decode - need.decode}
        limited: list[str] = []
        for pool in sorted(POOLS, key=lambda pool: -spare[pool]):
            target = self._step(self.before, pool, -1)
            broken = self._broken(target)
            if not broken:
                return self._to(target, reasons.IDLE, message)
            limited += [x for x in broken if x not in limited]
        return self._hold(reasons.AT_LEAST, f"{message}; no fewer are allowed", *limited)

    # Needs and their history.

    def _need(self, tolerance: float) -> Split:
        use = TARGET * (1 + tolerance)
        prefill, decode = (max(1, math.ceil(demand / use - 1e-9)) for demand in self.demand)
        return Split(prefill, decode)

    def _remember(self, grow: Split, keep: Split) -> None:
        memory = self.memory
        longest = max(self._window("up"), self._window("down"))
        if memory.needs and self.now - memory.needs[-1].at > GAP_SECONDS:
            memory.needs = []
        memory.needs = [n for n in memory.needs if n.at > self.now - longest - 1]
        memory.needs.append(Need(self.now, grow.total, keep.total))
        if len(memory.needs) == 1:
            memory.since = self.now

    def _full(self, window: float) -> bool:
        """Whether needs were seen for the whole window: after a restart, or a gap, they were not."""
        return self.now - self.memory.since >= window - 1e-6

    def _within(self, window: float) -> list[Need]:
        return [n for n in self.memory.needs if n.at >= self.now - window - 1e-6]

    # Limits.

    def _tolerance(self, rules: Rules) -> float:
        return TOLERANCE if rules.tolerance is None else rules.tolerance

    def _window(self, way: Way) -> float:
        """Up: what is short for less is over before a pod is ready. Down: a worker that is let go takes a start to come
        back, and one more before it is missed less than it cost. Reversals double either."""
        start = self.growth.start_seconds
        own = min(UP_SECONDS, start) if way == "up" else max(DOWN_SECONDS, 2 * start)
        given = self._rules(way).stabilization_seconds
        last = self.memory.changes[-1] if self.memory.changes else None
        opposes = last is not None and (last.workers > 0) != (way == "up")
        doubled = 2**self.memory.reversals if opposes else 1
        return min(WINDOW_MOST, (own if given is None else given) * doubled)

    def _rules(self, way: Way) -> Rules:
        return self.growth.up if way == "up" else self.growth.down

    def _allowed(self, way: Way) -> int:
        """Workers that the direction's rates allow now, as HPA counts them."""
        rules = self._rules(way)
        if rules.select == "Disabled":
            return 0
        if not rules.rates:
            return 1 << 30
        sign = 1 if way == "up" else -1
        found = []
        for rate in rules.rates:
            changed = sum(c.workers for c in self.memory.changes if c.at > self.now - rate.period_seconds)
            began = self.before.total - changed
            most = rate.value if rate.type == "Pods" else math.ceil(began * rate.value / 100)
            recent = [c.workers for c in self.memory.changes if c.at > self.now - rate.period_seconds]
            found.append(max(0, most - sum(max(0, sign * n) for n in recent)))
        return max(found) if rules.select == "Max" else min(found)

    def _broken(self, target: Split) -> tuple[str, ...]:
        """Limits that `target` breaks and the present counts do not: no bound may forbid a step towards it."""
        bounds = self.bounds
        found = []
        for pool, least, most in (
            ("prefill", bounds.prefill_min, bounds.prefill_max),
            ("decode", bounds.decode_min, bounds.decode_max),
        ):
            count, was = getattr(target, pool), getattr(self.before, pool)
            if (count < least and count < was) or (count > most and count > was):
                found.append(reasons.LIMITED_BY_BOUNDS)
                break
        ratio = Bounds(ratio_min=bounds.ratio_min, ratio_max=bounds.ratio_max)
        if self._leaves(ratio, target) if self.growth.homes_serve else not feasible(ratio, target.total):
            found.append(reasons.LIMITED_BY_RATIO)
        leaving = {pool: self.fleets[pool].terminating for pool in POOLS}
        gpus = (target.prefill + leaving["prefill"]) * bounds.prefill_gpus
        gpus += (target.decode + leaving["decode"]) * bounds.decode_gpus
        if bounds.max_gpus is not None and gpus > bounds.max_gpus and target.total > self.before.total:
            found.append(reasons.LIMITED_BY_BUDGET)
        return tuple(found)

    def _leaves(self, ratio: Bounds, target: Split) -> bool:
        """Whether `target` is outside of the ratio and no nearer to it than the present counts."""
        turn = target.prefill * self.before.decode - self.before.prefill * target.decode
        low, high = ratio.ratio_min, ratio.ratio_max
        below = low is not None and target.prefill * low.decode < low.prefill * target.decode
        above = high is not None and target.prefill * high.decode > high.prefill * target.decode
        return (below and turn <= 0) or (above and turn >= 0)

    def _least(self, pool: Pool) -> int:
        return self.bounds.prefill_min if pool == "prefill" else self.bounds.decode_min

    @staticmethod
    def _step(split: Split, pool: Pool, by: int) -> Split:
        return split._replace(**{pool: getattr(split, pool) + by})

    # Ends.

    def _demands(self) -> str:
        return f"demand of {self.demand[0]:.1f} prefill and {self.demand[1]:.1f} decode workers"

    def _to(self, target: Split, reason: str, message: str, *limited: str) -> Sizing:
        return Sizing(self.before, target, reason, message, limited)

    def _hold(self, reason: str, message: str, *limited: str) -> Sizing:
        return Sizing(self.before, self.before, reason, message, limited)
