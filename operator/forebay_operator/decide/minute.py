"""The role gear's look ahead: what a split would miss in the next minute, and what waiting for it would cost.

A move of a second may be made at any look. So it is made when it gains, and not before waiting for the next looks costs
anything: most bursts that would fill a pool in half a minute, were they to last so long, are over by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay_operator.decide import fluid
from forebay_operator.decide.fluid import Course, Load, Model
from forebay_operator.decide.memory import Queues
from forebay_operator.decide.outlook import STRESS, STRESS_SHARE
from forebay_operator.decide.types import Split

STRESS_MOST = 1.5
WAIT_SECONDS = 10.0
"""Two looks: one that sees the need and one that confirms it."""

WAIT_LOADS = (1.0, 1.5)
"""Waiting must cost nothing at either: for want of a better forecast, half as much again as the window brought."""

NOTHING = 0.002
"""Share of what arrives meanwhile that waiting may cost."""


@dataclass(frozen=True, slots=True)
class Move:
    """How a split would be reached, and the load as it would be met."""

    course: Course
    load: Load
    decode_scale: float


@dataclass(frozen=True, slots=True)
class Minute:
    seconds: float
    """Looked ahead."""

    horizon: float
    """Seconds in which a shift is noticed and answered: what waits at the end is charged for two of them at most."""

    cap: float
    serving: Split
    model: Model
    queues: Queues
    """There now."""

    def cost(self, move: Move) -> float:
        """Expected share of misses, a tenth of it at a heavier load."""
        normal = self._share(move)
        if self._relieved(move):
            # Decoders that are soon as full as before gain nothing: else two splits that both miss take turns.
            scale = move.decode_scale
            _, _, later = fluid.roll(
                move.load, self.model, move.course, self._left_by(move), self.seconds / 2, decode_scale=scale
            )
            there = move.course.after
            rest = Move(Course(there, there, 0.0), move.load, scale)
            normal = max(normal, self._share(rest, later))
        stress = self._share(move, scale=STRESS, slot=2)
        return (1 - STRESS_SHARE) * normal + STRESS_SHARE * min(STRESS_MOST, stress)

    def waiting(self, move: Move) -> float:
        """What it costs to make the move WAIT_SECONDS later, in misses per request that arrives meanwhile.

        Of misses in the time looked ahead: what is left at its end, where even the other split fills up, is for later
        looks to answer.

        No less than what the present split misses of them: where the move helps little, or its own queue grows beyond
        what is looked at, later always looks as good.
        """
        course = Course(self.serving, move.course.after, WAIT_SECONDS + move.course.switch)
        later = Move(course, move.load, move.decode_scale)
        lost = max(
            self._share(later, self.queues, scale=x, along=True, left=False) - self._share(move, scale=x, left=False)
            for x in WAIT_LOADS
        )
        stay = Course(self.serving, self.serving, 0.0)
        missed = fluid.share(fluid.roll(move.load, self.model, stay, self.queues, WAIT_SECONDS))
        return max(lost * self.seconds / WAIT_SECONDS, missed)

    def _relieved(self, move: Move) -> bool:
        return move.course.during.decode < self.serving.decode

    def _left_by(self, move: Move) -> Queues:
        """A decoder that changes roles takes its requests along."""
        if not self._relieved(move):
            return self.queues
        kept = move.course.after.decode / max(1, self.serving.decode)
        return Queues(self.queues.prefill_seconds, self.queues.decoding * kept, self.queues.earlier * kept)

    def _share(
        self,
        move: Move,
        queues: Queues | None = None,
        *,
        scale: float = 1.0,
        slot: int = 1,
        along: bool = False,
        left: bool = True,
    ) -> float:
        rolled = fluid.roll(
            move.load,
            self.model,
            move.course,
            queues or self._left_by(move),
            self.seconds,
            scale=scale,
            decode_scale=move.decode_scale,
            slot=slot,
            horizon=self.horizon if left else 0.0,
            cap=self.cap,
            along=along,
            bear=True,
        )
        return fluid.share(rolled)
