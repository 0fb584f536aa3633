"""How many workers there should be: growing and shrinking the total. Pure.

The split of the workers that are there is value.py's; this decides the replicas of the two home pools. The rules, in
order, each with its reason:

    a pod that stays Pending is given up       the pool goes back to what is ready, and backs off
    demand does not fit the workers            grow the pool that is shorter, within bounds, GPUs and rate
    pods are starting or ending                shrink nothing: one pool at a time
    demand fits one worker less, with margin   shrink the pool with more to spare, by one

Demand is in workers' worth of load (estimate.py). A role needs ceil(demand / TARGET) workers; the tolerance makes the
need for growing a little smaller and the need for keeping a little larger: a dead band. Here the sum counts, since
roles may switch; size_homes.py has the pools that serve at home only, size_rules.py what both go by.
"""

from __future__ import annotations

from typing import Literal

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.decide import reasons
from forebay_operator.decide.memory import SizeMemory
from forebay_operator.decide.project import feasible
from forebay_operator.decide.size_homes import Apart
from forebay_operator.decide.size_rules import TARGET, Call
from forebay_operator.decide.types import Bounds, Fleet, Growth, Sizing, Split


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
    kind = Apart if growth.homes_serve else _Together
    call = kind(fleets, demand, serving, bounds, growth, pause, explained, memory.next(), now)
    found = call.decide()
    call.note(found)
    return found, call.memory


class _Together(Call):
    """Workers serve in either role."""

    def _by_need(self, grow: Split, keep: Split) -> Sizing:
        if grow.total > self.before.total:
            return self._grow(grow)
        if keep.total < self.before.total:
            return self._changing() or self._shrink(keep)
        return self._hold(reasons.FITS, f"{self._demands()} fits {self.before}, and would not fit one worker less")

    def _grow(self, need: Split) -> Sizing:
        message = f"{self._demands()} needs {need.total} workers at {TARGET:.0%} use and there are {self.before.total}"
        stopped = self._may_not_grow(message)
        if stopped is not None:
            return stopped
        window = self._window("up")
        if not self._full(window) or (wanted := self._least_grow(window)) <= self.before.total:
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

    def _outside(self, target: Split) -> bool:
        ratio = Bounds(ratio_min=self.bounds.ratio_min, ratio_max=self.bounds.ratio_max)
        return not feasible(ratio, target.total)

    def _shrink(self, need: Split) -> Sizing:
        message = f"{self._demands()} fits {self.before.total - 1} workers of {self.before.total} with a margin"
        stopped = self._may_not_shrink(message, self.explained)
        if stopped is not None:
            return stopped
        window = self._window("down")
        if not self._full(window) or self._most_keep(window) >= self.before.total:
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
