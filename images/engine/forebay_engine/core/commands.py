"""What the transfer loop tells the step thread, beside the messages of types.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay_engine.types import Abort, EngineRequest, SetDraining, UnsettledRead


@dataclass(frozen=True, slots=True)
class PullDone:
    request_id: str
    ok: bool
    unsettled: UnsettledRead | None = None
    """A read that may still be landing in the blocks: they must not be used again before it is over."""


@dataclass(frozen=True, slots=True)
class EarlyPulled:
    """The first `blocks` reserved blocks hold the prompt's KV."""

    request_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksFreed:
    """A lease ended with its reader's consent: its blocks may be reused at once."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksExpired:
    """A lease ran out: a reader may still be at it, so its blocks rest for one more lease."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """`reply` gets the reserved blocks, or None when there is no room; it is called on the step thread."""

    request_id: str
    prompt_tokens: int
    reply: Callable[[list[int] | None], None]


@dataclass(frozen=True, slots=True)
class ReleaseReservation:
    request_id: str
    unsettled: UnsettledRead | None = None
    """As in PullDone."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = (
    EngineRequest
    | Abort
    | SetDraining
    | PullDone
    | EarlyPulled
    | BlocksFreed
    | BlocksExpired
    | ReserveBlocks
    | ReleaseReservation
    | Stop
)
