"""What is said of a pod that finds no node: in the scheduler's words, with the remedy that fits."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_operator.observe.problems import problems
from forebay_operator.observe.types import ProblemKind


def pending(message: str, *claims: str) -> dict[str, Any]:
    volumes = [{"name": f"v{at}", "persistentVolumeClaim": {"claimName": claim}} for at, claim in enumerate(claims)]
    return {
        "kind": "Pod",
        "metadata": {"name": "a-prefill-1", "namespace": "llm", "labels": {"forebay.dev/pool": "prefill"}},
        "spec": {"volumes": [{"name": "tmp", "emptyDir": {}}, *volumes]},
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
        },
    }


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ('persistentvolumeclaim "models" not found', ProblemKind.MISSING_OBJECT),
        ("pod has unbound immediate PersistentVolumeClaims", ProblemKind.CLAIM),
        ('persistentvolumeclaim "models" is being deleted', ProblemKind.CLAIM),
        ('persistentvolumeclaim "models" bound to non-existent persistentvolume "v"', ProblemKind.CLAIM),
        ("1 node(s) had volume node affinity conflict, 1 node(s) had untolerated taint {a: }", ProblemKind.CLAIM),
        ("2 node(s) didn't match PersistentVolume's node affinity", ProblemKind.CLAIM),
        ("2 node(s) didn't find available persistent volumes to bind", ProblemKind.CLAIM),
        ("2 node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)", ProblemKind.CLAIM),
        ("2 Insufficient nvidia.com/gpu", ProblemKind.UNSCHEDULABLE),
        ("2 node(s) didn't match Pod's node affinity/selector", ProblemKind.UNSCHEDULABLE),
    ],
)
def test_a_claim_is_told_from_a_node_that_lacks_something(message: str, kind: ProblemKind) -> None:
    (problem,) = problems([], [], [pending(f"0/2 nodes are available: {message}.", "models", "cache")], 0.0)
    assert problem.kind is kind
    assert problem.message.endswith(f"none of 2 nodes: {message}.")
    assert ("claims cache, models: " in problem.message) == (kind is ProblemKind.CLAIM)


def test_a_claim_that_the_pod_does_not_name_is_not_named() -> None:
    (problem,) = problems([], [], [pending("pod has unbound immediate PersistentVolumeClaims")], 0.0)
    assert (problem.kind, problem.message) == (
        ProblemKind.CLAIM,
        "pod has unbound immediate PersistentVolumeClaims",
    )
