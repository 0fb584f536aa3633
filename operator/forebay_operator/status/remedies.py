"""What a person does about each kind of problem, and whether only a person can. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay_operator.api.conditions import Reason
from forebay_operator.observe.types import Problem, ProblemKind


@dataclass(frozen=True, slots=True)
class Remedy:
    reason: Reason
    text: str
    stalls: bool
    """No retry helps until somebody acts: kstatus' Stalled. The model may well go on serving meanwhile."""


REMEDIES: Final[dict[ProblemKind, Remedy]] = {
    ProblemKind.INVALID_SPEC: Remedy(Reason.INVALID_SPEC, "correct the spec; what runs goes on as it is", True),
    ProblemKind.FOREIGN_OBJECT: Remedy(
        Reason.FOREIGN_OBJECT, "rename the model, or delete the object if nobody needs it", True
    ),
    ProblemKind.REJECTED: Remedy(
        Reason.REJECTED, "change the spec or podTemplate, or the policy that refuses it", True
    ),
    ProblemKind.QUOTA_EXCEEDED: Remedy(Reason.QUOTA_EXCEEDED, "raise the quota or ask for fewer workers", True),
    ProblemKind.MISSING_OBJECT: Remedy(Reason.MISSING_OBJECT, "create it or correct its name in the spec", True),
    ProblemKind.IMAGE_PULL: Remedy(
        Reason.IMAGE_PULL_FAILED, "correct the image, or give podTemplate an imagePullSecret", True
    ),
    ProblemKind.VOLUME: Remedy(Reason.VOLUME_FAILED, "read the pod's events (kubectl describe pod)", True),
    ProblemKind.CRASHING: Remedy(Reason.CRASHING, "read the container's log and correct the spec or the model", True),
    ProblemKind.TRANSPORT: Remedy(
        Reason.TRANSPORT_UNAVAILABLE,
        "give the pods a device (transfer.rdma), name another transport, or leave transfer.required false",
        True,
    ),
    ProblemKind.NAMESPACE_GOING: Remedy(
        Reason.NAMESPACE_GOING, "nothing to do: the namespace is being deleted, and the model goes with it", True
    ),
    # A cluster autoscaler or a leaving pod may yet make room.
    ProblemKind.UNSCHEDULABLE: Remedy(Reason.UNSCHEDULABLE, "add nodes, or ask for fewer GPUs or workers", False),
    # A provisioner may be at work.
    ProblemKind.CLAIM: Remedy(
        Reason.UNSCHEDULABLE,
        "read the claims' events (kubectl describe pvc): their storage class, and the nodes that their volumes are for",
        False,
    ),
}


def describe(problem: Problem) -> str:
    """The object, what is wrong with it, and the remedy, in one line."""
    return f"{problem.object}: {problem.message}; {REMEDIES[problem.kind].text}"
