"""Sizes of pools whose workers serve at home only (`roleSwitching: Disabled`): each pool by its own demand. Pure.

A pool grows whatever the other has to spare, and shrinks whatever the other lacks:

    a pool's demand does not fit it            grow it; within the ratio the other pool may have to come along
    pods are starting or ending, of either     shrink nothing: one pool at a time
    a pool's demand fits one worker less       shrink it by one

Windows and reversals are each pool's own. Rates and the GPU budget are of the sum, and so is the back-off: pods that
found no place are told of the machine, not of a pool. Where the budget is used up, the pool with workers to spare
shrinks after its own window, and the short one, whose window is long over, takes the GPUs once its pod is gone.
"""

from __future__ import annotations

from typing import ClassVar, Final

from forebay_operator.api.labels import POOLS, Pool, other
from forebay_operator.decide import reasons
from forebay_operator.decide.size_rules import TARGET, Call
from forebay_operator.decide.types import Sizing, Split

ONLY_RATIO: Final = (reasons.LIMITED_BY_RATIO,)


class Apart(Call):
    apart: ClassVar[tuple[Pool | None, ...]] = POOLS

    def _by_need(self, grow: Split, keep: Split) -> Sizing:
        short = [pool for pool in POOLS if grow.of(pool) > self.before.of(pool)]
        spare = [pool for pool in POOLS if keep.of(pool) < self.before.of(pool)]
        held = self._grow(grow, short) if short else None
        if held is not None and held.target != self.before:
            return held
        if spare:
            found = self._changing() or self._shrink(grow, keep, spare, short)
            if held is None or found.target != self.before:
                return found
            if held.reason == reasons.AT_MOST:
                # What would make room, and what it waits for.
                limits = dict.fromkeys((*held.limited_by, *found.limited_by))
                return self._hold(held.reason, f"{held.message}. {found.reason}: {found.message}", *limits)
        return held or self._hold(
            reasons.FITS, f"{self._demands()} fits {self.before}, and neither pool would do with one worker less"
        )

    def _grow(self, need: Split, short: list[Pool]) -> Sizing:
        lack = " and ".join(f"{pool} needs {need.of(pool)} and has {self.before.of(pool)}" for pool in short)
        message = f"{self._demands()}: {lack}, at {TARGET:.0%} use"
        stopped = self._may_not_grow(message)
        if stopped is not None:
            return stopped
        wanted = self.before
        for pool in short:
            if self._lacks(pool):
                least = min(need.of(pool), self._least_grow(self._window("up", pool), pool))
                wanted = wanted._replace(**{pool: least})
        if wanted == self.before:
            window = min(self._window("up", pool) for pool in short)
            return self._hold(reasons.STABILIZING, f"{message}, but not for {window:g} s yet")
        path, stops = self._path(wanted)
        allowed = self._allowed("up")
        target = next((at for at in reversed(path[:allowed]) if not self._outside(at)), self.before)
        limited = [reasons.LIMITED_BY_RATE] if allowed < max(len(path), 1) else []
        if path and allowed and target == self.before:
            limited.append(reasons.LIMITED_BY_RATIO)
        limited += [limit for limit in stops if limit not in limited]
        if target == self.before:
            return self._hold(reasons.AT_MOST, f"{message}; no more are allowed now", *limited)
        return self._to(target, reasons.SHORT, message, *limited)

    def _lacks(self, pool: Pool) -> bool:
        """For the pool's whole window."""
        window = self._window("up", pool)
        return self._full(window) and self._least_grow(window, pool) > self.before.of(pool)

    def _path(self, wanted: Split) -> tuple[list[Split], list[str]]:
        """Counts one worker after the other as far towards `wanted` as limits allow, and what stops short of it.

        The other pool comes along only where the ratio asks for it, and only if a pool that is short gains by it.
        Counts on the way may be outside of the ratio; the last are not.
        """
        path: list[Split] = []
        at, gained, best, reach = self.before, 0, 0, 0
        stops: tuple[str, ...] = ()
        while True:
            way = self._way(at, wanted)
            if isinstance(way, tuple):
                stops = way
                break
            gained += at.of(way) < wanted.of(way)
            at = self._step(at, way, 1)
            path.append(at)
            if gained > best and not self._outside(at):
                best, reach = gained, len(path)
        if stops and reach < len(path):
            # The pool that came along was asked for by the ratio.
            stops = tuple(dict.fromkeys((*stops, reasons.LIMITED_BY_RATIO)))
        return path[:reach], list(stops)

    def _way(self, at: Split, wanted: Split) -> Pool | tuple[str, ...]:
        """The pool that gets the next worker, or the limits that keep each from it; none when all is reached."""
        lacks = {pool: wanted.of(pool) - at.of(pool) for pool in POOLS}
        # Of two equally short pools decode grows: its shortage is a cliff.
        short = sorted((pool for pool in POOLS if lacks[pool] > 0), key=lambda pool: (-lacks[pool], pool))
        outside = self._outside(at)
        if not short and not outside:
            return ()
        broken = {pool: self._broken(self._step(at, pool, 1)) for pool in POOLS}
        free = [pool for pool in short if not broken[pool]]
        if free:
            return free[0]
        held = [pool for pool in short if broken[pool] == ONLY_RATIO]
        along: Pool | None = self._behind(at) if outside else other(held[0]) if held else None
        if along is not None and not broken[along]:
            return along
        if held and not outside:
            return held[0]
        if along is not None and broken[along] == ONLY_RATIO:
            return along
        asked = [*short, *([along] if along is not None else [])]
        return tuple(dict.fromkeys(limit for pool in asked for limit in broken[pool]))

    def _shrink(self, grow: Split, keep: Split, spare: list[Pool], short: list[Pool]) -> Sizing:
        excess = {pool: self.before.of(pool) - keep.of(pool) for pool in spare}
        ordered = sorted(spare, key=lambda pool: -excess[pool])
        fits = " and ".join(f"{pool} fits {self.before.of(pool) - 1} of {self.before.of(pool)}" for pool in ordered)
        message = f"{self._demands()}: {fits} with a margin"
        # A pool that is short explains misses; they must not keep the GPUs it needs with the other.
        stopped = self._may_not_shrink(message, self.explained or any(self._lacks(pool) for pool in short))
        if stopped is not None:
            return stopped
        lasting = [pool for pool in ordered if self._idles(pool)]
        if not lasting:
            window = min(self._window("down", pool) for pool in spare)
            return self._hold(reasons.STABILIZING, f"{message}, but not for {window:g} s yet")
        if self._allowed("down") < 1:
            return self._hold(reasons.STABILIZING, f"{message}; scaleDown allows none now", reasons.LIMITED_BY_RATE)
        path, _ = self._path(grow)
        end = path[-1] if path else self.before
        limited: list[str] = []
        for pool in lasting:
            target = self._step(self.before, pool, -1)
            broken = self._broken(target)
            if not broken and (end.of(pool) > self.before.of(pool) or self._outside(self._step(end, pool, -1))):
                # It came along for the other's growth, or will: it would grow again.
                broken = ONLY_RATIO
            if not broken:
                return self._to(target, reasons.IDLE, message)
            limited += [x for x in broken if x not in limited]
        return self._hold(reasons.AT_LEAST, f"{message}; no fewer are allowed", *limited)

    def _idles(self, pool: Pool) -> bool:
        """For the pool's whole window."""
        window = self._window("down", pool)
        return self._full(window) and self._most_keep(window, pool) < self.before.of(pool)

    # The ratio binds the pools themselves.

    def _outside(self, target: Split) -> bool:
        """And no nearer to it than the present counts."""
        turn = target.prefill * self.before.decode - self.before.prefill * target.decode
        below, above = self._sides(target)
        return (below and turn <= 0) or (above and turn >= 0)

    def _behind(self, at: Split) -> Pool:
        """The pool that `at`, outside of the ratio, has too few of."""
        return "prefill" if self._sides(at)[0] else "decode"

    def _sides(self, target: Split) -> tuple[bool, bool]:
        """Whether it is below the ratio, and whether above it."""
        low, high = self.bounds.ratio_min, self.bounds.ratio_max
        return (
            low is not None and target.prefill * low.decode < low.prefill * target.decode,
            high is not None and target.prefill * high.decode > high.prefill * target.decode,
        )
