"""How fast this worker is, measured step by step: what the cap on mixed steps and predicted waits are made of. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIN_CHUNK = 16
"""Prompt tokens of a mixed step at least, or a prompt would never end where decode steps alone take too long."""

_KEPT = 0.95
"""Of what is known, from one step to the next: a mean over the last 20 steps of a kind or so."""

_REGROW = 1.01
_LEAST_TRIM = 0.25


@dataclass(slots=True)
class _Rate:
    """Seconds per unit, over recent steps; each counts by its units."""

    units: float = 0.0
    seconds: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self.units = _KEPT * self.units + units
        self.seconds = _KEPT * self.seconds + seconds

    @property
    def known(self) -> bool:
        return self.units > 0

    @property
    def seconds_per_unit(self) -> float:
        return self.seconds / self.units if self.units > 0 else 0.0


@dataclass(slots=True)
class Pace:
    _decode: _Rate = field(default_factory=_Rate)
    """Steps that only decoded."""
    _prompt: _Rate = field(default_factory=_Rate)
    """Tokens of steps that only computed prompts."""
    _mixed: _Rate = field(default_factory=_Rate)
    """Prompt tokens of mixed steps, and what those steps took beyond a decode step."""
    _prompts: _Rate = field(default_factory=_Rate)
    """Prompt tokens of all steps with any."""
    _fits: int = 2 * MIN_CHUNK
    """The largest chunk of late that a mixed step was known to have time for."""
    _trim: float = 1.0
    _limit: float = 0.0
    """The limit that mixed_chunk() was asked for last."""

    def observe(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step ended that computed so many prompt tokens beside a token each for `decodes` sequences."""
        estimated = self._mixed.seconds > 0
        if prompt_tokens:
            self._prompts.add(prompt_tokens, seconds)
            if not decodes:
                self._prompt.add(prompt_tokens, seconds)
            elif self._decode.known:
                self._mixed.add(prompt_tokens, max(0.0, seconds - self.decode_seconds))
        elif decodes:
            self._decode.add(1, seconds)
        if prompt_tokens and decodes and self._limit > 0:
            if seconds <= self._limit:
                self._fits = max(self._fits, prompt_tokens)
                self._trim = min(1.0, self._trim * _REGROW)
            else:
                self._fits = max(MIN_CHUNK, int(prompt_tokens * self._limit / seconds))
                if estimated:
                    self._trim = max(_LEAST_TRIM, self._trim * self._limit / seconds)

    @property
    def decode_seconds(self) -> float:
        """Of a step that only decodes, as batches are now; 0: unknown."""
        return self._decode.seconds_per_unit

    def mixed_chunk(self, limit: float) -> int:
        """Prompt tokens that fit a step of `limit` seconds beside the decodes of now; MIN_CHUNK at least.

        The least of three bounds. What a prompt token added to earlier mixed steps: a line, too hopeful while the
        decodes' memory traffic hides the computing. The computing alone, from steps with prompts only. And twice what
        has fitted before, since neither is known at the start. Trimmed by what came out too long.
        """
        self._limit = limit
        return max(MIN_CHUNK, int(self._trim * min(2 * self._fits, self._estimated_chunk(limit))))

    def _estimated_chunk(self, limit: float) -> float:
        chunk = math.inf
        if self._mixed.seconds > 0:
            chunk = (limit - self.decode_seconds) / self._mixed.seconds_per_unit
        if self._prompt.seconds > 0:
            chunk = min(chunk, limit / self._prompt.seconds_per_unit)
        return chunk

    def mixed_velocity(self, decoding: bool) -> float:
        """Prompt tokens a second that fit beside the decodes of now; 0: unknown, or no limit was ever asked for."""
        if not decoding:
            return 1.0 / self._prompt.seconds_per_unit if self._prompt.seconds > 0 else 0.0
        if self._limit <= 0 or not self._mixed.known:
            return 0.0
        chunk = self._estimated_chunk(self._limit)
        return max(MIN_CHUNK, self._trim * chunk) / max(self._limit, self.decode_seconds) if chunk < math.inf else 0.0

    def prompt_seconds(self, tokens: int) -> float | None:
        """Expected time to compute `tokens` prompt tokens, as steps are now; None: unknown."""
        return tokens * self._prompts.seconds_per_unit if self._prompts.known else None
