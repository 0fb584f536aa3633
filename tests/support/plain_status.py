"""The least that a status must say, for tests of the runtime alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from forebay_operator.act.roles import Targets
from forebay_operator.api.labels import POOLS
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.observe.types import Observation


def plain_status(
    model: DisaggregatedModel | None,
    observation: Observation,
    *,
    name: str,
    namespace: str,
    targets: Targets,
    previous: Mapping[str, Any],
    now: datetime,
) -> dict[str, Any]:
    ready = observation.router_ready > 0 and any(pod.serving for pod in observation.pods)
    problem = observation.problems[0] if observation.problems else None
    held = {c["type"]: c for c in previous.get("conditions", [])}

    def condition(kind: str, status: bool, reason: str, message: str = "") -> dict[str, Any]:
        text = "True" if status else "False"
        same = held.get(kind, {}).get("status") == text
        return {
            "type": kind,
            "status": text,
            "reason": reason,
            "message": message,
            "lastTransitionTime": held[kind]["lastTransitionTime"] if same else now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "observedGeneration": observation.generation,
        }

    status: dict[str, Any] = {
        "observedGeneration": observation.generation,
        "conditions": [
            condition("Ready", ready, "Serving" if ready else "NoWorkerReady"),
            condition("Stalled", problem is not None, problem.kind.value if problem else "NotStalled",
                      problem.message if problem else ""),
        ],
    }  # fmt: skip
    for pool in POOLS:
        home = observation.of_pool(pool)
        status[pool] = {
            "replicas": len(home),
            "serving": len(observation.in_role(pool)),
            "target": targets[pool],
            "onLoan": sum(pod.serving and pod.serves_as != pool for pod in home),
        }
    return status
