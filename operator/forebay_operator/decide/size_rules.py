"""What sizing goes by, whether roles may switch (size.py) or workers serve at home only (size_homes.py). Pure.

Needs and their windows, rates and limits, pods that stay Pending, and what is remembered.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Final, Literal

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.decide import reasons
from forebay_operator.decide.memory import Need, Sized, SizeMemory
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
WAYS: Final[tuple[Way, ...]] = ("up", "down")


class Call(ABC):
    """One call of sized(): decide() says what becomes of the pools, note() remembers it."""

    apart: ClassVar[tuple[Pool | None, ...]] = (None,)
    """What has windows, changes and reversals of its own: each pool, or (None) the sum."""

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
        return self._by_need(grow, keep)

    @abstractmethod
    def _by_need(self, grow: Split, keep: Split) -> Sizing:
        """`grow`: workers that demand asks for; `keep`: those that it does not let go."""

    def note(self, found: Sizing) -> None:
        """Remember a change, and whether it undoes an earlier one."""
        before, target = found.before, found.target
        if target == before:
            return
        pools = target.prefill - before.prefill, target.decode - before.decode
        change = Sized(self.now, target.total - before.total, pools)
        for pool in self.apart:
            if change.of(pool) and found.reason != reasons.PENDING_UNDONE:
                self._note_reversal(pool, change)
        self.memory.changes = [*self._kept(), change]

    def _note_reversal(self, pool: Pool | None, change: Sized) -> None:
        last = self._last(pool)
        if last is None or (last.of(pool) > 0) == (change.of(pool) > 0):
            return
        recent = self.now - last.at <= REVERSAL_SECONDS
        count = min(MOST_DOUBLINGS, self.memory.reversals_of(pool) + 1) if recent else 0
        self.memory.set_reversals(pool, count)

    def _kept(self) -> list[Sized]:
        """Changes that still count. Of a pool also the last: a window that reversals doubled may be longer than half an
        hour, and the other pool's changes do not end it."""
        last = [self._last(pool) for pool in self.apart if pool is not None]
        return [c for c in self.memory.changes if c.at > self.now - REVERSAL_SECONDS or c in last]

    def _last(self, pool: Pool | None) -> Sized | None:
        return next((c for c in reversed(self.memory.changes) if c.of(pool)), None)

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

    def _may_not_grow(self, message: str) -> Sizing | None:
        if self.pause in ("All", "ScaleUp"):
            return self._hold(reasons.PAUSED, f"scaling.pause is {self.pause}: {message}", reasons.LIMITED_BY_PAUSE)
        if self.now < self.memory.blocked_until:
            left = self.memory.blocked_until - self.now
            return self._hold(
                reasons.BACKING_OFF, f"{message}; pods stayed Pending, no growth for another {left:.0f} s"
            )
        return None

    def _may_not_shrink(self, message: str, explained: bool) -> Sizing | None:
        if self.pause in ("All", "ScaleDown"):
            return self._hold(reasons.PAUSED, f"scaling.pause is {self.pause}: {message}", reasons.LIMITED_BY_PAUSE)
        if not explained:
            return self._hold(reasons.UNEXPLAINED, f"{message}, but more requests miss than that explains")
        return None

    # Needs and their history.

    def _need(self, tolerance: float) -> Split:
        use = TARGET * (1 + tolerance)
        prefill, decode = (max(1, math.ceil(demand / use - 1e-9)) for demand in self.demand)
        return Split(prefill, decode)

    def _remember(self, grow: Split, keep: Split) -> None:
        memory = self.memory
        longest = max(self._window(way, pool) for way in WAYS for pool in self.apart)
        if memory.needs and self.now - memory.needs[-1].at > GAP_SECONDS:
            memory.needs = []
        if self.apart != (None,) and any(n.prefill is None for n in memory.needs):
            memory.needs = []
        memory.needs = [n for n in memory.needs if n.at > self.now - longest - 1]
        memory.needs.append(Need(self.now, grow.total, keep.total, (grow.prefill, keep.prefill)))
        if len(memory.needs) == 1:
            memory.since = self.now

    def _full(self, window: float) -> bool:
        """Whether needs were seen for the whole window: after a restart, or a gap, they were not."""
        return self.now - self.memory.since >= window - 1e-6

    def _least_grow(self, window: float, pool: Pool | None = None) -> int:
        """Workers that demand asked for at the least within the window; `_most_keep` at the most."""
        return min(n.grow_of(pool) for n in self._within(window))

    def _most_keep(self, window: float, pool: Pool | None = None) -> int:
        return max(n.keep_of(pool) for n in self._within(window))

    def _within(self, window: float) -> list[Need]:
        return [n for n in self.memory.needs if n.at >= self.now - window - 1e-6]

    # Limits.

    def _tolerance(self, rules: Rules) -> float:
        return TOLERANCE if rules.tolerance is None else rules.tolerance

    def _window(self, way: Way, pool: Pool | None = None) -> float:
        """Up: what is short for less is over before a pod is ready. Down: a worker that is let go takes a start to come
        back, and one more before it is missed less than it cost. Reversals double either."""
        start = self.growth.start_seconds
        own = min(UP_SECONDS, start) if way == "up" else max(DOWN_SECONDS, 2 * start)
        given = self._rules(way).stabilization_seconds
        last = self._last(pool)
        opposes = last is not None and (last.of(pool) > 0) != (way == "up")
        doubled = 2 ** self.memory.reversals_of(pool) if opposes else 1
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
            recent = [c.workers for c in self.memory.changes if c.at > self.now - rate.period_seconds]
            most = rate.most(self.before.total - sum(recent))
            found.append(max(0, most - sum(max(0, sign * n) for n in recent)))
        return max(found) if rules.select == "Max" else min(found)

    def _broken(self, target: Split) -> tuple[str, ...]:
        """Limits that `target` breaks and the present counts do not: no bound may forbid a step towards it."""
        bounds = self.bounds
        found = []
        limits: tuple[tuple[Pool, int, int], ...] = (
            ("prefill", bounds.prefill_min, bounds.prefill_max),
            ("decode", bounds.decode_min, bounds.decode_max),
        )
        for pool, least, most in limits:
            count, was = target.of(pool), self.before.of(pool)
            if (count < least and count < was) or (count > most and count > was):
                found.append(reasons.LIMITED_BY_BOUNDS)
                break
        if self._outside(target):
            found.append(reasons.LIMITED_BY_RATIO)
        leaving = {pool: self.fleets[pool].terminating for pool in POOLS}
        gpus = (target.prefill + leaving["prefill"]) * bounds.prefill_gpus
        gpus += (target.decode + leaving["decode"]) * bounds.decode_gpus
        if bounds.max_gpus is not None and gpus > bounds.max_gpus and target.total > self.before.total:
            found.append(reasons.LIMITED_BY_BUDGET)
        return tuple(found)

    @abstractmethod
    def _outside(self, target: Split) -> bool:
        """Whether `target` breaks the ratio and the present counts do not, or less."""

    def _least(self, pool: Pool) -> int:
        return self.bounds.prefill_min if pool == "prefill" else self.bounds.decode_min

    @staticmethod
    def _step(split: Split, pool: Pool, by: int) -> Split:
        return split._replace(**{pool: split.of(pool) + by})

    # Ends.

    def _demands(self) -> str:
        return f"demand of {self.demand[0]:.1f} prefill and {self.demand[1]:.1f} decode workers"

    def _to(self, target: Split, reason: str, message: str, *limited: str) -> Sizing:
        return Sizing(self.before, target, reason, message, limited)

    def _hold(self, reason: str, message: str, *limited: str) -> Sizing:
        return Sizing(self.before, self.before, reason, message, limited)
