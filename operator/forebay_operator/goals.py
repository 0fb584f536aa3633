"""How many workers each pool should have, and how many should serve in each role. Pure.

Autoscaled counts live in status, never in spec. Until a scaling law sets them, a pool with bounds keeps what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from forebay_operator.act.growth import PoolGoal, Rules
from forebay_operator.act.roles import Targets
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.ratio import Ratio, parse_ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModel, DisaggregatedModelSpec
from forebay_operator.decide import Fleet, Split
from forebay_operator.homes import Homes, home_limits, resized
from forebay_operator.local.containers import pool_sizes
from forebay_operator.observe.types import Observation

HOMES = "homes"
"""Key in status.memory: workers per home pool."""


def pool_counts(model: DisaggregatedModel, status: Mapping[str, Any], observation: Observation) -> dict[Pool, int]:
    """Workers whose home each pool should be.

    A fixed figure from the spec; else the one in status, else the live count, within the bounds. `spec.replicas` (what
    /scale sets) shares its sum out: what bounds leave open goes to decode first.
    """
    fresh = pool_sizes(model)
    if model.spec.replicas is not None:
        return {pool: fresh[pool] for pool in POOLS}
    remembered = (status.get("memory") or {}).get(HOMES) or {}
    counts: dict[Pool, int] = {}
    for pool in POOLS:
        bounds = model.spec.bounds(pool)
        live = sum(d.replicas for d in observation.deployments if d.pool == pool)
        held = remembered.get(pool)
        count = held if isinstance(held, int) and held > 0 else live or fresh[pool]
        counts[pool] = max(bounds.min_replicas, min(count, bounds.max_replicas))
    return counts


def pool_goals(counts: Mapping[Pool, int], deployments: Mapping[Pool, str]) -> dict[Pool, PoolGoal]:
    return {pool: PoolGoal(counts[pool], deployments[pool]) for pool in POOLS}


def role_targets(spec: DisaggregatedModelSpec, status: Mapping[str, Any], counts: Mapping[Pool, int]) -> Targets:
    """Workers that should serve in each role: those in status while they fit the workers there should be and the bounds
    of the ratio, else one's home pool each."""
    total = sum(counts.values())
    held = {pool: (status.get(pool) or {}).get("target") for pool in POOLS}
    prefill, decode = held["prefill"], held["decode"]
    if spec.scaling.role_switching != "Enabled" or not isinstance(prefill, int) or not isinstance(decode, int):
        return dict(counts)
    if prefill < 1 or decode < 1 or prefill + decode != total:
        return dict(counts)
    low, high = parse_ratio(spec.scaling.ratio.min), parse_ratio(spec.scaling.ratio.max)
    asked = Ratio(prefill, decode)
    if not (low.at_most(asked) and asked.at_most(high)):
        return dict(counts)
    return {"prefill": prefill, "decode": decode}


def homes_of(
    spec: DisaggregatedModelSpec,
    counts: Mapping[Pool, int],
    observation: Observation,
    *,
    yielded: Collection[Pool],
    held: Collection[Pool],
) -> Homes:
    """The home pools for the law. A pod that finds no node is act/pending.py's: the law sees `counts` without it."""
    fleets = {}
    for pool in POOLS:
        pods = observation.of_pool(pool)
        leaving = sum(pod.terminating or pod.draining for pod in pods)
        fleets[pool] = Fleet(counts[pool], sum(pod.serving for pod in pods), terminating=leaving)
    return Homes(fleets, home_limits(spec, counts, yielded, held))


def resized_targets(status: Mapping[str, Any], counts: Mapping[Pool, int]) -> dict[Pool, int] | None:
    """The role targets in status, fitted to pools whose sizes have changed since; None: there are none to fit."""
    homes = (status.get("memory") or {}).get(HOMES) or {}
    old = {pool: (status.get(pool) or {}).get("target") for pool in POOLS}
    if not all(isinstance(value, int) and value > 0 for value in (*old.values(), *(homes.get(p) for p in POOLS))):
        return None
    before, after = (Split(sizes["prefill"], sizes["decode"]) for sizes in (homes, counts))
    targets = Split(old["prefill"] or 0, old["decode"] or 0)
    if targets.total != before.total or after.total < len(POOLS):
        return None
    fitted = resized(targets, before, after)
    return {"prefill": fitted.prefill, "decode": fitted.decode}


def rules(spec: DisaggregatedModelSpec) -> Rules:
    wait = spec.drain.timeout_seconds if spec.drain.policy == "Finish" else 0
    gpus = {pool: spec.gpus_per_worker(pool) for pool in POOLS}
    return Rules(
        timedelta(seconds=wait),
        spec.rollout.max_unavailable,
        spec.rollout.max_surge,
        gpus={pool: each.count for pool, each in gpus.items()},
        max_gpus=spec.scaling.max_gpus,
        one_resource=gpus["prefill"].resource == gpus["decode"].resource and all(g.count for g in gpus.values()),
    )
