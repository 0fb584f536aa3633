"""Ratios of prefill to decode workers, written `P:D`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"([1-9][0-9]{0,2}):([1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True)
class Ratio:
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    def at_most(self, other: Ratio) -> bool:
        """True when this has no larger a share of prefill than `other`."""
        return self.prefill * other.decode <= other.prefill * self.decode

    def fit(self, workers: int) -> Ratio | None:
        """This ratio in exactly `workers` workers, or None when it does not divide them."""
        parts = self.prefill + self.decode
        if workers < parts or workers % parts:
            return None
        return Ratio(self.prefill * (workers // parts), self.decode * (workers // parts))


def parse_ratio(text: str) -> Ratio:
    """Raises ValueError when `text` is not P:D with both from 1 to 999."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a ratio; write prefill:decode, both from 1 to 999, such as 1:2")
    return Ratio(int(match.group(1)), int(match.group(2)))
