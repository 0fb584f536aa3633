"""What the law remembers between observations. decide() never changes the one it is given: it returns the next."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.observe.missed import MissedIn


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """A change of targets."""

    at: float
    workers: int
    towards_prefill: bool


class Sized(msgspec.Struct, frozen=True, array_like=True):
    """A change of the number of workers; below 0: fewer."""

    at: float
    workers: int
    pools: tuple[int, int] | None = None
    """Of them, those of the (prefill, decode) pool. None: an earlier version wrote it, and it may have been either."""

    def of(self, pool: Pool | None) -> int:
        """A pool's part; None: all."""
        return self.workers if pool is None or self.pools is None else self.pools[POOLS.index(pool)]


class Need(msgspec.Struct, frozen=True, array_like=True):
    """Workers that demand asked for: to grow to, and to keep."""

    at: float
    grow: int
    keep: int
    prefill: tuple[int, int] | None = None
    """Of both, the prefill pool's. None: an earlier version wrote it."""

    def grow_of(self, pool: Pool | None) -> int:
        """A pool's part, where `prefill` tells it; None: the sum. keep_of() likewise."""
        return self._part(self.grow, 0, pool)

    def keep_of(self, pool: Pool | None) -> int:
        return self._part(self.keep, 1, pool)

    def _part(self, total: int, which: int, pool: Pool | None) -> int:
        if pool is None:
            return total
        assert self.prefill is not None
        return self.prefill[which] if pool == "prefill" else total - self.prefill[which]


class SizeMemory(msgspec.Struct):
    """What growing and shrinking remember (size_rules.py). All but `needs` and `since` is durable."""

    changes: list[Sized] = []
    """Of the last half hour; where workers serve at home only, each pool's last one as well."""

    reversals: int = 0
    """Of the sum; `pool_reversals` where workers serve at home only."""

    failures: int = 0
    """Growths in a row that ended with a Pending pod given up."""

    blocked_until: float = 0.0
    needs: list[Need] = []
    since: float = 0.0
    """First of `needs` without a gap."""

    pool_reversals: dict[str, int] = {}

    def reversals_of(self, pool: Pool | None) -> int:
        return self.reversals if pool is None else self.pool_reversals.get(pool, 0)

    def set_reversals(self, pool: Pool | None, count: int) -> None:
        if pool is None:
            self.reversals = count
        else:
            self.pool_reversals[pool] = count

    def next(self) -> SizeMemory:
        other = copy.copy(self)
        other.changes, other.needs = list(self.changes), list(self.needs)
        other.pool_reversals = dict(self.pool_reversals)
        return other

    def durable(self) -> SizeMemory:
        return SizeMemory(
            list(self.changes),
            self.reversals,
            self.failures,
            self.blocked_until,
            pool_reversals=dict(self.pool_reversals),
        )


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """The counters of one observation."""

    at: float
    generated: int
    finished: int
    refused: int
    missed: int
    missed_in: MissedIn | None = None
    """None: not known, or longer ago than anyone asks for (attribute.py)."""


class Queues(msgspec.Struct, array_like=True):
    """State of the fluid model for one split: what would wait and run, had it been in force."""

    prefill_seconds: float = 0.0
    decoding: float = 0.0
    earlier: float = 0.0
    """Of `decoding`: requests of traffic that has ended, which are longer than what arrives."""


class Track(msgspec.Struct, array_like=True):
    """A split's shadow: its queues, and its share of misses over the last half hour."""

    queues: Queues = msgspec.field(default_factory=Queues)
    missed: float = 0.0
    offered: float = 0.0

    @property
    def share(self) -> float:
        return self.missed / self.offered if self.offered > 0 else 0.0


class Traffic(msgspec.Struct, frozen=True):
    """What traffic was like: sums over the last half hour, in which what is older fades."""

    seconds: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    """Requests times the output length as estimated when they came; `context_tokens` likewise."""

    context_tokens: float = 0.0


class Before(msgspec.Struct, frozen=True):
    """The half hour before a regime: what comes back when it ends."""

    traffic: Traffic
    shares: dict[str, float]
    """Share of misses of each split, by prefill workers."""

    @staticmethod
    def of(memory: Memory) -> Before:
        """The half hour until now."""
        shares = {key: track.share for key, track in memory.tracks.items() if key != "real"}
        return Before(memory.traffic, shares)


class Look(msgspec.Struct, frozen=True, array_like=True):
    """What the last look at all splits found, where no target changed by it: said again until the next one."""

    at: float
    """`taken_at` of its observation."""

    target: tuple[int, int]
    advised: tuple[int, int]
    """Another than `target` where nobody carries out what is decided."""

    reason: str
    message: str
    limited_by: tuple[str, ...]
    inputs: dict[str, float]
    options: list[tuple[tuple[int, int], float, float]]
    """Option's fields."""


class WorkerTotals(msgspec.Struct, frozen=True, array_like=True):
    prefill_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    decode_batch: int
    decode_resident: int
    role: str


class Memory(msgspec.Struct):
    """Durable fields go into status with the decision they belong to; the soft ones are checkpointed now and then.

    Without its soft part the law holds until its windows are full: see durable().
    """

    # Durable.
    target: tuple[int, int] | None = None
    moves: list[Moved] = []
    """Of the last half hour."""

    size: SizeMemory = msgspec.field(default_factory=SizeMemory)

    # Soft.
    started_at: float | None = None
    """First observation of this window; None after a restart without a checkpoint."""

    seen_at: float = -1.0
    """`taken_at` of the last observation that was used."""

    arrivals: list[tuple[float, int, int]] = []
    """(end of the second, requests, prompt tokens), the last 60 s."""

    totals: list[Totals] = []
    """The last 600 s."""

    output: float = 0.0
    """Mean output tokens of an answer; 0: no answer yet."""

    output_since: float = -1.0
    """Since when answers have been as long as they are."""

    context: float = 0.0
    """Mean context of the requests that decoded at the last look, and mean prompt of those that arrived."""

    prompt: float = 0.0
    earlier_context: float = 0.0
    """As `context`, before answers became shorter; 0: they did not, or no longer one runs any more."""

    earlier_prompt: float = 0.0

    workers: dict[str, WorkerTotals] = {}
    prefill_factor: float = 1.0
    """Measured over believed velocity."""

    decode_factor: float = 1.0
    """Measured over believed decode step time."""

    prefill_samples: list[float] = []
    decode_samples: list[float] = []
    tracks: dict[str, Track] = {}
    """By prefill workers; `real` is what was in force."""

    regime: int = 0
    """Cheapest split of the present regime, in prefill workers; 0: none yet."""

    regime_since: float = 0.0
    regime_worse_at: float = -1.0
    """Since when it has not been the cheapest without a break; below 0: it is."""

    runs: list[float] = []
    """Seconds that past regimes lasted."""

    traffic: Traffic = msgspec.field(default_factory=Traffic)
    before: Before | None = None
    """None: in the first regime."""

    pending: Before | None = None
    """As `before`, from `regime_worse_at` on, until it is certain that the regime has ended."""

    rivals: dict[str, Track] = {}
    """As `tracks`, but since the present regime began and from the queues that were there then."""

    pending_rivals: dict[str, Track] = {}
    """As `rivals`, since `regime_worse_at`."""

    confirming: int = 0
    """Direction that observations have asked for without a break; 0: none."""

    gains: dict[str, float] = {}
    """Slow gears: the least gain of each split since `confirming_at`, by prefill workers."""

    confirming_at: float = 0.0
    """Since when."""

    look: Look | None = None
    """None: the next look rolls every split out."""

    unrolled_seconds: float = 0.0
    """Whose arrivals no split's shadow has seen yet."""

    elsewhere: str = ""
    """The part of misses that was the last word on a split that holds, since no split changes it (attribute.py)."""

    move_started: float = -1.0
    move_seconds: list[float] = []
    """How long past moves took."""

    def next(self) -> Memory:
        """A copy to write to. Lists of frozen records are copied one level deep, which is enough."""
        other = copy.copy(self)
        for name in ("moves", "arrivals", "totals", "prefill_samples", "decode_samples", "runs", "move_seconds"):
            setattr(other, name, list(getattr(self, name)))
        other.size = self.size.next()
        # A Track is replaced, never written to.
        for name in ("workers", "gains", "tracks", "rivals", "pending_rivals"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def forget_windows(self) -> None:
        """What counters and arrivals said, with their times: the law holds until its windows are full again."""
        self.started_at, self.output_since, self.confirming = None, -1.0, 0
        self.arrivals, self.totals, self.workers = [], [], {}
        self.look, self.unrolled_seconds = None, 0.0

    def durable(self) -> Memory:
        """What a restart without a checkpoint is left with."""
        return Memory(target=self.target, moves=list(self.moves), size=self.size.durable())

    def dump(self) -> dict[str, Any]:
        """As plain JSON values."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value

    @staticmethod
    def load(value: dict[str, Any]) -> Memory:
        """Raises msgspec.ValidationError when `value` is not what dump() gives."""
        return msgspec.convert(value, Memory)
