"""The rescaling law: decide(observation, policy, memory, now) -> Decision. Pure: no clock, no I/O.

docs/rescaling.md explains it.
"""

from forebay_operator.decide.decide import decide
from forebay_operator.decide.memory import Memory
from forebay_operator.decide.types import (
    Bounds,
    Decision,
    Fleet,
    Gear,
    Growth,
    Policy,
    Rate,
    Rules,
    Sizing,
    Split,
    Workers,
)

__all__ = [
    "Bounds",
    "Decision",
    "Fleet",
    "Gear",
    "Growth",
    "Memory",
    "Policy",
    "Rate",
    "Rules",
    "Sizing",
    "Split",
    "Workers",
    "decide",
]
