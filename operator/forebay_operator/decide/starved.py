"""Which role starves: its demand is half a worker over what serves it, and the other pool can spare workers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay_operator.decide.estimate import Estimate
from forebay_operator.decide.types import Policy, Split

STARVED_WORKERS: Final = 0.5
SPARE: Final = 0.95
"""Of its capacity: what a donor may be left with. Decode capacity is a batch that still holds TPOT, so this is safe."""

BUSY: Final = 0.9
BUSY_CONVERTIBLE: Final = 0.8
"""Utilisation beyond which prefill counts as short: its queue waits two service times at 0.8, 4.5 at 0.9 (M/D/1). By
score on the mixes: where decoders take prompts they are the donor and the reserve at once, and an earlier move pays."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Workers that each role needs right now, and what is to be done about it."""

    prefill: float
    decode: float
    lent: int
    """Decoders that prefill must be lent; below 0: the other way round."""


def shortage(split: Split, seen: Estimate, policy: Policy, decode_factor: float) -> Shortage:
    """At `split`, by the windows of seconds."""
    prefill, decode = _pressure(seen, policy, decode_factor)
    absorbed = seen.absorbed(policy, decode_factor, split.decode)
    return Shortage(prefill, decode, _lent(split, prefill, decode, absorbed, math.inf))


def sudden(split: Split, seen: Estimate, policy: Policy, decode_factor: float, last_move: float) -> Shortage:
    """As shortage(), but a second or two of prompts, which are no window yet and still more than chance brings, move
    one worker: the next looks tell whether more must. `last_move`: before it, arrivals prove nothing.
    """
    prefill, decode = _pressure(seen, policy, decode_factor)
    absorbed = seen.absorbed(policy, decode_factor, split.decode)
    most = math.inf
    if prefill - split.prefill - absorbed <= STARVED_WORKERS:
        surge = seen.surge(policy, split.prefill + absorbed, _busy(policy), last_move)
        if surge - split.prefill - absorbed > STARVED_WORKERS:
            prefill, most = surge, 1
    return Shortage(prefill, decode, _lent(split, prefill, decode, absorbed, most))


def _busy(policy: Policy) -> float:
    return BUSY_CONVERTIBLE if policy.convertible else BUSY


def _pressure(seen: Estimate, policy: Policy, decode_factor: float) -> tuple[float, float]:
    prefill, decode = seen.pressure(policy, decode_factor)
    return prefill / _busy(policy), decode


def _lent(split: Split, prefill: float, decode: float, absorbed: float, most: float) -> int:
    """The donor keeps its own demand below SPARE of what is left to it. Where both are short none is lent: what a split
    is worth then decides."""
    short = prefill - split.prefill - absorbed
    if short > STARVED_WORKERS and decode < split.decode:
        return int(max(0, min(math.ceil(short), most, split.decode - max(1, math.ceil(decode / SPARE)))))
    need = decode - split.decode
    if need > STARVED_WORKERS and prefill < split.prefill:
        return -max(0, min(math.ceil(need), split.prefill - max(1, math.ceil(prefill / SPARE))))
    return 0
