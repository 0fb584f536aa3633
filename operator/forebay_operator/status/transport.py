"""Which transport KV moves over, gathered from the workers: what isn't known is said as Unknown. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from forebay_operator.observe.types import PodView
from forebay_wire.load import LoadReport

Name = Literal["RDMA", "NVLink", "TCP", "SharedMemory", "Simulated", "Mixed", "Unknown"]

_BY_LOWER: Final[dict[str, Name]] = {name.lower(): name for name in get_args(Name)}
_RANK: Final = {"TCP": 1, "SharedMemory": 2, "RDMA": 3, "NVLink": 4}
"""Better ones are larger. A transport better than the one asked for is as good as asked."""

MEASURABLE_SECONDS: Final = 0.1
"""Of transfer time; less than this says nothing about a rate."""


def is_worse(used: str, asked: str) -> bool:
    """What is not known, on either side, is not worse."""
    wanted = _RANK.get(asked, 0)
    return _RANK.get(_BY_LOWER.get(used.lower(), "Unknown"), wanted) < wanted


@dataclass(frozen=True, slots=True)
class TransportFacts:
    in_use: Name
    counts: dict[Name, int]
    """Workers by the transport they report, Unknown left out."""

    gigabytes_per_second: float | None

    def worse_than(self, asked: str) -> int:
        """Workers on a transport below the one asked for."""
        return sum(count for name, count in self.counts.items() if is_worse(name, asked))

    @property
    def known(self) -> int:
        return sum(self.counts.values())


def transport_facts(pods: Iterable[PodView]) -> TransportFacts:
    loads: list[LoadReport] = [pod.load for pod in pods if pod.load is not None]
    counts: dict[Name, int] = {}
    for load in loads:
        name = _BY_LOWER.get(load.transport.lower(), "Unknown")
        if name != "Unknown":
            counts[name] = counts.get(name, 0) + 1
    in_use: Name = "Unknown" if not counts else next(iter(counts)) if len(counts) == 1 else "Mixed"
    seconds = sum(load.kv_seconds for load in loads)
    moved = sum(load.kv_bytes_received for load in loads)
    rate = moved / seconds / 1e9 if seconds >= MEASURABLE_SECONDS else None
    return TransportFacts(in_use, dict(sorted(counts.items())), rate)
