"""What the two phases of one request share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from forebay_router.account import Account
from forebay_router.answer import Answer
from forebay_router.attempts import Attempts
from forebay_router.context import Context
from forebay_router.course import Course
from forebay_router.legs import ClientCall
from forebay_router.reservation import Reservation
from forebay_wire import headers


@dataclass(frozen=True, slots=True)
class Parts:
    """One request's own objects; each keeps its part of the state."""

    ctx: Context
    call: ClientCall
    headers: Mapping[str, str]
    """On every request to a worker."""

    prompt_tokens: int
    """Estimated."""

    turn: int
    course: Course
    account: Account
    attempts: Attempts
    answer: Answer
    reservation: Reservation

    def sent(self, *, first: bool = False) -> Mapping[str, str]:
        """Headers of a leg. `first`: it computes the prompt, so the worker may refuse it as too late, while none was
        spent on the request."""
        policy = self.ctx.policy
        limits: dict[str, str] = {}
        if policy.convertible != "never" and math.isfinite(policy.step_seconds):
            limits[headers.STEP_SECONDS] = f"{policy.step_seconds:.4f}"
        if first and not self.attempts.spent and math.isfinite(policy.latest_seconds):
            limits[headers.WAIT_SECONDS] = f"{max(0.001, policy.latest_seconds - self.account.elapsed):.4f}"
        return {**self.headers, **limits}
