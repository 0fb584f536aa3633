"""A worker as it is chosen from: its health and its figures as of now."""

from __future__ import annotations

import enum

import msgspec

Key = tuple[str, str]
"""Name and engine id."""


class Health(enum.IntEnum):
    """From best to worst; only the first two may be given work."""

    READY = 0
    SUSPECT = 1
    """Silent: taken only when no READY worker is left."""

    DRAINING = 2
    LOADING = 3
    UNKNOWN = 4
    """No report yet."""

    DEAD = 5


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One worker as of now: its last report plus what was sent to it since.

    Each request makes some of every worker: a Struct is made in a fifth of a dataclass's time.
    """

    name: str
    engine_id: str
    role: str | None
    health: Health
    compat_hash: str = ""
    queued_tokens: int = 0
    """Prompt tokens waiting to be computed."""

    velocity: float = 0.0
    """Prefill tokens per second; 0: unknown."""

    running: int = 0
    """Requests running, waiting or on their way."""

    max_running: int = 0
    resident_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    decoding: int = 0
    """Requests that the last step made a token for."""

    waiting_pulls: int = 0
    step_seconds: float = 0.0
    """Of a decode step as of now; 0: nothing decodes, or not known."""

    mixed_velocity: float = 0.0
    """Prompt tokens per second that fit beside the decodes of now; 0: unknown."""

    cached_tokens: int = 0
    """Of the prompt to place, so many tokens' KV are in its prefix cache, as far as the router knows."""

    def uncached(self, prompt_tokens: int) -> int:
        """Tokens it would compute: at least one, the last, whose logits give the first token."""
        return max(1, prompt_tokens - self.cached_tokens)

    @property
    def key(self) -> Key:
        """A restarted worker is another one: a request that saw the old one die may try it again."""
        return (self.name, self.engine_id)
