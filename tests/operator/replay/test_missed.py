"""A replay counts misses by what took their time, as the router does, and the law hears of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from forebay_operator.observe.traffic import Observation
from forebay_operator.replay.cluster import Cluster, MakeWorker
from forebay_operator.replay.exact import ExactWorker
from forebay_operator.replay.fast import FastWorker
from forebay_operator.replay.trace import Arrival
from support.replay import MODEL, poisson, setup

PATHS = pytest.mark.parametrize("path", [FastWorker, ExactWorker])


def last_seen(cluster: Cluster, trace: list[Arrival]) -> Observation:
    seen: list[Observation] = []
    cluster.run(trace, lambda observation, now: seen.append(observation))
    return seen[-1]


@PATHS
@pytest.mark.parametrize(
    ("bandwidth", "prefill", "rate", "output", "largest"),
    [(1.0, 1, 30.0, 100, "prefill"), (1.0, 3, 30.0, 800, "decode"), (0.003, 2, 0.8, 20, "transfer")],
)
def test_the_largest_part(
    path: MakeWorker, bandwidth: float, prefill: int, rate: float, output: int, largest: str
) -> None:
    """`bandwidth`: of links, over the usual."""
    model = msgspec.structs.replace(MODEL, transfer_bytes_per_second=MODEL.transfer_bytes_per_second * bandwidth)
    trace = [*poisson(rate, 60.0, 2000, output), Arrival(100.0, 10, 2)]
    seen = last_seen(Cluster(replace(setup(4, prefill), model=model), path), trace)
    assert seen.missed_in is not None
    counts = {part: getattr(seen.missed_in, part) for part in ("prefill", "transfer", "decode", "router", "failed")}
    assert seen.missed_in.total == (seen.missed_ttft or 0) + (seen.missed_tpot or 0) > 20
    assert max(counts, key=lambda part: counts[part]) == largest, counts
