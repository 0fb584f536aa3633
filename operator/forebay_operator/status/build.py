"""One status from one Observation. Pure: the same arguments give the same bytes, and it comes to rest.

Everything in it is rebuilt from what was observed. Of the status before only three things are taken over: when a
condition last changed, figures that moved too little to matter (steady.py), and what others own (decisions).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from forebay_operator.api.conditions import Type, truncate
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.status import (
    Condition,
    DisaggregatedModelStatus,
    Latency,
    PoolStatus,
    TransportStatus,
)
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.names import selector
from forebay_operator.build.service import endpoint_url
from forebay_operator.observe.types import LatencyView, Observation
from forebay_operator.status.conditions import CONDITIONS, Facts
from forebay_operator.status.pinning import check_pinning
from forebay_operator.status.steady import steady, steady_int, steady_percent
from forebay_operator.status.transport import TransportFacts, transport_facts

PASSED_ON: Final = ("decision", "decisions")
"""Written by whoever decides; operation and memory are the reconciler's to add."""


def build_status(
    model: DisaggregatedModel | None,
    observation: Observation,
    *,
    name: str,
    namespace: str,
    targets: Mapping[Pool, int],
    previous: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    """The new status, as JSON values, but `operation` and `memory`.

    `model` None: the spec could not be read, which one of the observation's problems says. `now` must have a timezone.
    """
    facts = Facts(
        spec=None if model is None else model.spec,
        observation=observation,
        targets=targets,
        pinning=None if model is None else check_pinning(model.spec, observation.nodes),
        transport=transport_facts(observation.pods),
        now_unix=now.timestamp(),
        limited_by=_limited_by(previous),
        decided=_decided(previous),
    )
    conditions = _conditions(facts, previous, now)
    status = DisaggregatedModelStatus(
        observed_generation=observation.generation,
        conditions=conditions,
        summary=_summary(conditions, facts),
        replicas=sum(not pod.terminating for pod in observation.pods),
        selector=",".join(f"{key}={value}" for key, value in selector(name, "worker").items()),
        prefill=_pool(facts, "prefill"),
        decode=_pool(facts, "decode"),
        ratio=":".join(str(facts.serving[pool]) for pool in POOLS),
        latency=_latency(observation.latency, previous.get("latency") or {}),
        transport=_transport(facts.transport, previous.get("transport") or {}),
        endpoint=endpoint_url(name, namespace),
    )
    out: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"decisions"})
    return out | {key: previous[key] for key in PASSED_ON if key in previous}


def _conditions(facts: Facts, previous: Mapping[str, Any], now: datetime) -> list[Condition]:
    held = {condition["type"]: condition for condition in previous.get("conditions") or []}
    conditions = []
    for type_, judge in CONDITIONS.items():
        status, reason, message = judge(facts)
        before = held.get(type_)
        changed = before is None or before["status"] != status
        conditions.append(
            Condition(
                type=type_,
                status=status,
                reason=reason,
                message=truncate(message),
                last_transition_time=now.replace(microsecond=0)
                if changed or before is None
                else datetime.fromisoformat(before["lastTransitionTime"]),
                observed_generation=facts.observation.generation,
            )
        )
    return conditions


def _summary(conditions: list[Condition], facts: Facts) -> str:
    """The most pressing of it, in one line."""
    of = {condition.type: condition for condition in conditions}
    ready, stalled = of[Type.READY], of[Type.STALLED]
    if ready.status != "True":
        return truncate(f"Not serving: {stalled.message if stalled.status == 'True' else ready.message}")
    over = "" if facts.transport.in_use in ("Unknown", "Simulated") else f" over {facts.transport.in_use}"
    text = f"Serving{over}: {ready.message}"
    if stalled.status == "True":
        text += f". Needs a person: {stalled.message}"
    return truncate(text)


def _pool(facts: Facts, pool: Pool) -> PoolStatus:
    home = [pod for pod in facts.observation.of_pool(pool) if not pod.terminating]
    serving, target = facts.serving[pool], facts.targets[pool]
    return PoolStatus(
        replicas=len(home),
        serving=serving,
        target=target,
        on_loan=sum(pod.serving and pod.serves_as != pool for pod in home),
        summary=f"{serving}/{target}",
    )


def _latency(view: LatencyView | None, previous: Mapping[str, Any]) -> Latency | None:
    if view is None or view == LatencyView():
        return None
    return Latency(
        time_to_first_token_p95_milliseconds=steady_int(
            previous.get("timeToFirstTokenP95Milliseconds"), view.time_to_first_token_p95_milliseconds
        ),
        time_per_output_token_p95_milliseconds=steady_int(
            previous.get("timePerOutputTokenP95Milliseconds"), view.time_per_output_token_p95_milliseconds
        ),
        attainment_percent=steady_percent(previous.get("attainmentPercent"), view.attainment_percent),
    )


def _transport(facts: TransportFacts, previous: Mapping[str, Any]) -> TransportStatus:
    held = previous.get("measuredGigabytesPerSecond")
    rate = steady(float(held) if held is not None else None, facts.gigabytes_per_second)
    return TransportStatus(in_use=facts.in_use, measured_gigabytes_per_second=None if rate is None else f"{rate:.1f}")


def _limited_by(previous: Mapping[str, Any]) -> str | None:
    decision = previous.get("decision")
    return None if decision is None else str(decision.get("limitedBy", ""))


def _decided(previous: Mapping[str, Any]) -> frozenset[str]:
    decision = previous.get("decision") or {}
    said = (decision.get("reason"), (decision.get("inputs") or {}).get("workers"))
    return frozenset(reason for reason in said if isinstance(reason, str))
