"""Two pools that follow what sizing asks, for tests of sized()."""

from __future__ import annotations

from forebay_operator.api.labels import Pool
from forebay_operator.decide import Bounds, Fleet, Growth, Rate, Rules, Sizing, Split
from forebay_operator.decide.memory import SizeMemory
from forebay_operator.decide.size import sized

QUICK = Growth(
    up=Rules(stabilization_seconds=0.0, rates=(Rate("Pods", 2, 60.0),)),
    down=Rules(stabilization_seconds=20.0, rates=(Rate("Pods", 1, 60.0),)),
    start_seconds=60.0,
)

ANY = Bounds()


class Plant:
    """Pods start after `start` seconds and end after `stop`."""

    def __init__(self, prefill: int = 2, decode: int = 2, start: float = 30.0, stop: float = 20.0) -> None:
        self.now = 0.0
        self.start, self.stop = start, stop
        self.ready: dict[Pool, int] = {"prefill": prefill, "decode": decode}
        self.starting: dict[Pool, list[float]] = {"prefill": [], "decode": []}
        self.leaving: dict[Pool, list[float]] = {"prefill": [], "decode": []}
        self.memory = SizeMemory()
        self.seen_leaving = 0

    def fleets(self) -> dict[Pool, Fleet]:
        return {
            pool: Fleet(
                wanted=self.ready[pool] + len(self.starting[pool]),
                ready=self.ready[pool],
                pending_since=min(self.starting[pool], default=None),
                terminating=len(self.leaving[pool]),
            )
            for pool in self.ready
        }

    def tick(
        self,
        demand: tuple[float, float],
        growth: Growth = QUICK,
        bounds: Bounds = ANY,
        explained: bool = True,
        pause: str = "None",
        seconds: float = 5.0,
    ) -> Sizing:
        self.now += seconds
        for pool in self.ready:
            up = [at for at in self.starting[pool] if self.now - at >= self.start]
            self.ready[pool] += len(up)
            self.starting[pool] = [at for at in self.starting[pool] if at not in up]
            self.leaving[pool] = [at for at in self.leaving[pool] if self.now - at < self.stop]
        self.seen_leaving = sum(len(left) for left in self.leaving.values())
        serving = Split(self.ready["prefill"], self.ready["decode"])
        found, self.memory = sized(
            self.fleets(),
            demand,
            serving,
            bounds,
            growth,
            pause,  # type: ignore[arg-type]
            explained,
            self.memory,
            self.now,
        )
        for pool in self.ready:
            change = getattr(found.target, pool) - getattr(found.before, pool)
            self.starting[pool] += [self.now] * max(0, change)
            for _ in range(-min(0, change)):
                if self.starting[pool]:
                    self.starting[pool].pop()
                else:
                    self.ready[pool] -= 1
                    self.leaving[pool].append(self.now)
        return found

    @property
    def held(self) -> int:
        """Pods that hold a GPU."""
        return sum(self.ready[p] + len(self.starting[p]) + len(self.leaving[p]) for p in self.ready)

    @property
    def split(self) -> Split:
        """Pods that are there or on their way, by pool."""
        return Split(*(self.ready[pool] + len(self.starting[pool]) for pool in self.ready))
