"""From a model's spec to the rescaling law's policy. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from forebay_operator.api.labels import Pool
from forebay_operator.api.ratio import parse_ratio
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.decide import Bounds, Gear, Growth, Policy, Rate, Rules, Workers

ROLE_SECONDS: Final = 1.0
"""From a decision to the first request that the worker gets in its new role."""

STALE_SECONDS: Final = {"Endpoints": 30.0, "Prometheus": 90.0}
"""Prometheus scrapes each 15 to 60 s."""

MIXED_SHARE: Final = 0.9

Pause = Literal["None", "All", "ScaleUp", "ScaleDown"]


def law_policy(
    spec: DisaggregatedModelSpec, workers: Workers, workers_total: int, growth: Growth | None = None
) -> Policy:
    """What the law needs of `spec`. `workers`: their speed; `workers_total`: how many there should be.

    A fixed pool's workers may serve in either role, down to one. GPUs do not change with a role, so the budget does not
    limit role switches. Where roles are not switched and pools grow, the law sizes the pools and moves no role: a split
    that it can't mend must not keep it from that, so only growth is bound.
    """
    objectives, scaling = spec.objectives, spec.scaling
    switching = scaling.role_switching == "Enabled"
    fewest, most = {}, {}
    pools: tuple[Pool, Pool] = ("prefill", "decode")
    for pool in pools:
        fixed = spec.pool(pool).replicas is not None or not switching
        bounds = spec.bounds(pool)
        fewest[pool] = 1 if fixed else bounds.min_replicas
        most[pool] = max(1, workers_total - 1) if fixed else bounds.max_replicas
    policy = Policy(
        ttft_seconds=objectives.ttft_seconds,
        tpot_seconds=objectives.tpot_seconds,
        gear=Gear(ROLE_SECONDS, drains=False),
        workers=_mixing(workers, objectives.tpot_seconds),
        bounds=Bounds(
            prefill_min=fewest["prefill"],
            prefill_max=most["prefill"],
            decode_min=fewest["decode"],
            decode_max=most["decode"],
            ratio_min=parse_ratio(scaling.ratio.min) if switching else None,
            ratio_max=parse_ratio(scaling.ratio.max) if switching else None,
        ),
        convertible=spec.router.convertible != "Never",
        mode=scaling.mode if switching or growth is not None else "Off",
        pause=_pause(spec),
        attainment=objectives.attainment_percent / 100,
        stale_seconds=STALE_SECONDS[scaling.metrics.source],
        growth=growth,
    )
    return replace(policy, move_rules=_move_rules(spec)) if switching else replace(policy, moves_per_minute=0)


def _mixing(workers: Workers, tpot: float | None) -> Workers:
    """With what a decode worker computes of prompts beside its decodes: what the router's gear lets such a step take
    (forebay_router.gear.MIXED_SHARE), less what a decode step takes anyway. Without a TPOT objective
    there is no such limit, and what such a step takes is not known."""
    if tpot is None:
        return workers
    seconds = MIXED_SHARE * tpot
    chunk = int(workers.prefill_velocity * max(0.0, seconds - workers.weights_seconds))
    return replace(workers, mixed_chunk=chunk, mixed_seconds=seconds) if chunk > 0 else workers


def _pause(spec: DisaggregatedModelSpec) -> Pause:
    """spec.scaling.pause, and what behavior switches off. Up and down are the prefill role's."""
    scaling = spec.scaling
    if scaling.behavior is None or scaling.pause == "All":
        return scaling.pause
    up = scaling.pause == "ScaleUp" or scaling.behavior.scale_up.select_policy == "Disabled"
    down = scaling.pause == "ScaleDown" or scaling.behavior.scale_down.select_policy == "Disabled"
    return "All" if up and down else "ScaleUp" if up else "ScaleDown" if down else "None"


def _move_rules(spec: DisaggregatedModelSpec) -> tuple[Rules, ...]:
    """The pair moves both ways with each switch, so each direction's policies hold for both. Empty: the law's own."""
    behavior = spec.scaling.behavior
    if behavior is None:
        return ()
    return tuple(
        Rules(
            select=direction.select_policy,
            rates=tuple(Rate(each.type, each.value, float(each.period_seconds)) for each in direction.policies),
        )
        for direction in (behavior.scale_up, behavior.scale_down)
        if direction.policies
    )
