"""What the two phases of one request share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forebay_router.account import Account
from forebay_router.answer import Answer
from forebay_router.attempts import Attempts
from forebay_router.context import Context
from forebay_router.course import Course
from forebay_router.legs import ClientCall
from forebay_router.reservation import Reservation


@dataclass(frozen=True, slots=True)
class Parts:
    """One request's own objects; each keeps its part of the state."""

    ctx: Context
    call: ClientCall
    headers: Mapping[str, str]
    """On every request to a worker."""

    prompt_tokens: int
    """Estimated."""

    tokens: int
    """Prompt and answer, estimated."""

    turn: int
    course: Course
    account: Account
    attempts: Attempts
    answer: Answer
    reservation: Reservation
