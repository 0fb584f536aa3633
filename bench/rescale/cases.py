"""Which replays the bench is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bench import mixes
from forebay_operator.replay.policies import LAWS

WORKERS = 8
START = f"fixed:{WORKERS // 2}:{WORKERS - WORKERS // 2}"
FIXED = [f"fixed:{p}:{WORKERS - p}" for p in range(1, WORKERS)]
MIX_POLICIES = [*LAWS, *FIXED, "oracle"]
GEARS = ("role", "replica-30", "replica-120")
VARIANTS = ("lag15", "v-30", "v+30")
COLUMNS = ("mix", "level", "gear", "convertible", "variant", "policy", "seed")


@dataclass(frozen=True, slots=True)
class Case:
    mix: str
    level: str
    gear: str
    convertible: bool
    policy: str
    seed: int
    ttft: float = 1.0
    tpot: float = 0.04
    variant: str = ""
    """`lag15`: metrics 15 s late; `v-30`, `v+30`: told velocities 30 % too low or high; or nothing."""

    scale: float = 1.0
    """Of the segments' length."""

    rate: float = 0.0
    """Of a trace alone."""

    @property
    def columns(self) -> dict[str, object]:
        """What names its row."""
        values = (self.mix, self.level, self.gear, "on" if self.convertible else "off", self.variant, self.policy)
        return dict(zip(COLUMNS, (*values, self.seed), strict=True))

    @property
    def shares(self) -> Case:
        """Equal for all cases that can use the same replays of fixed splits: those never move, whatever the gear."""
        return replace(self, gear="role", policy="")


def tight(mix: str, level: str, gear: str, convertible: bool, policy: str, seed: int) -> Case:
    return Case(mix, level, gear, convertible, policy, seed, ttft=0.5, tpot=0.02)


def short_cases() -> Iterator[Case]:
    some = [*LAWS, *FIXED[1:5]]
    for convertible, policy in itertools.product((False, True), some):
        yield Case("mix", "heavy", "role", convertible, policy, 0, scale=0.15)
    for policy in ("forebay", "demand", START):
        yield Case("mix", "heavy", "replica-30", False, policy, 0, scale=0.15)


def cases() -> Iterator[Case]:
    """All but the traces alone."""
    return (case for case in _cases() if case.policy != "oracle" or (case.gear, case.level) == ("role", "heavy"))


def _cases() -> Iterator[Case]:
    on_off = (False, True)
    for seed, level, gear, on, policy in itertools.product(range(3), mixes.RATES, GEARS, on_off, MIX_POLICIES):
        yield Case("mix", level, gear, on, policy, seed)
    for mix, gear, on, policy in itertools.product(("long", "alternating"), GEARS, on_off, MIX_POLICIES):
        yield Case(mix, "heavy", gear, on, policy, 0)
    for variant, gear, on, seed in itertools.product(VARIANTS, GEARS, on_off, (0, 1)):
        yield Case("mix", "heavy", gear, on, "forebay", seed, variant=variant)
    for variant, mix, gear in itertools.product(VARIANTS, ("long", "alternating"), GEARS):
        yield Case(mix, "heavy", gear, False, "forebay", 0, variant=variant)
    for gear, on in itertools.product(GEARS, on_off):
        yield Case("steady", "heavy", gear, on, "forebay", 0)
    for seed, level, on, policy in itertools.product(range(3), mixes.RATES, on_off, MIX_POLICIES):
        yield tight("tight", level, "role", on, policy, seed)


def alone_cases(name: str, rate: float) -> Iterator[Case]:
    for on, policy in itertools.product((False, True), [*LAWS, *FIXED]):
        yield Case(name, "own", "role", on, policy, 0, rate=rate)


def tasks(todo: Iterable[Case]) -> list[list[Case]]:
    """Fixed splits and oracles of one trace and setting together; every other case for itself."""
    groups: dict[object, list[Case]] = {}
    for case in todo:
        shared = case.policy in FIXED or case.policy == "oracle"
        groups.setdefault(case.shares if shared else case, []).append(case)
    # The long ones first, so that no worker is left with one at the end.
    return sorted(groups.values(), key=len, reverse=True)
