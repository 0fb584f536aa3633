"""The random number of one token: a pure function of (seed, choice, position).

No generator state exists, so that a token does not depend on what else is in the batch, and any worker that knows the
request and the ids so far goes on with the same numbers.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in (0, 1), never an end of it. Any integers will do; they count modulo 2^64.

    Each argument is folded in with splitmix64's output function (Steele, Lea, Flood 2014, "Fast splittable
    pseudorandom number generators").
    """
    state = 0
    for word in (seed, choice, position):
        state = _mix((state ^ (word & _MASK)) + _GOLDEN & _MASK)
    # 52 bits and a half: the largest value is still below 1 after rounding.
    return ((state >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
