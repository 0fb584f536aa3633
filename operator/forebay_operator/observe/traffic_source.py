"""Where Observations come from: one interface, whatever is asked."""

from __future__ import annotations

from typing import Protocol

from forebay_operator.decide.types import Workers
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.fleet import Fleet
from forebay_operator.observe.traffic import Observation


class TrafficSource(Protocol):
    name: str
    """As spec.scaling.metrics.source says it."""

    async def observe(self, fleet: Fleet) -> Observation:
        """One look. Never raises for what a source says or does not say: the Observation's signals tell. It takes no
        longer than the source's own deadlines."""
        ...

    def workers(self) -> Workers | None:
        """The workers' speed as learnt so far; None until there is something to go by."""
        ...

    @property
    def capacity(self) -> Capacity:
        """What `workers` is made of, for the checkpoint."""
        ...

    async def close(self) -> None: ...
