"""What one reconcile saw of one model, frozen: gathered once by observe/, read by the pure parts (status/, decide/).

Absence has two spellings here and they differ: an empty tuple means "looked, there is none"; None means "could not
look". Nothing may be removed or reported missing on a None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forebay_operator.api.labels import Pool
from forebay_wire.load import LoadReport


@dataclass(frozen=True, slots=True)
class PodView:
    """A worker pod. Pods of another owner with the same labels are no part of an Observation, nor are those that have
    ended."""

    name: str
    pool: Pool
    """Home pool, from the label that the Deployment's selector holds."""

    revision: str
    uid: str = ""
    role: Pool | None = None
    """From the label; None: not given one yet."""

    node: str | None = None
    """None: not scheduled."""

    ip: str | None = None
    phase: str = "Pending"
    """Pending, Running or Unknown, as Kubernetes says it."""

    ready: bool = False
    """Of the Ready condition: its readiness probe answers."""

    draining: bool = False
    """The draining label is set, or the worker says so itself."""

    terminating: bool = False
    """It has a deletionTimestamp. It still holds its GPUs."""

    created_unix: float = 0.0
    load: LoadReport | None = None
    """None: no report, or none fresh enough."""

    load_age_seconds: float | None = None

    @property
    def serving(self) -> bool:
        """Whether the router sends it new requests."""
        return self.ready and not self.draining and not self.terminating

    @property
    def serves_as(self) -> Pool:
        """Its role, or its home pool until it has one (design section 3)."""
        return self.role or self.pool


@dataclass(frozen=True, slots=True)
class DeploymentView:
    name: str
    pool: Pool | None
    """None: the router's."""

    revision: str
    """Of the pod template; the router's Deployment has one name over all of them."""

    replicas: int
    """As spec.replicas says."""

    ready: int = 0
    updated: int = 0
    pods: int = 0
    """Of all of its ReplicaSets, leaving ones left out: more than `updated` while older ones are there."""

    terminating: int = 0
    generation: int = 0
    observed_generation: int = 0

    @property
    def settled(self) -> bool:
        """Its controller has acted on its latest spec, and every replica of it is ready."""
        return (
            self.observed_generation >= self.generation
            and self.updated == self.replicas == self.ready
            and not self.terminating
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """Whole units of extended resources, such as nvidia.com/gpu. What others' pods hold of them is not taken off."""

    ready: bool = True
    cordoned: bool = False


@dataclass(frozen=True, slots=True)
class LatencyView:
    """Over the routers' last window. A figure is None where no request fell into it."""

    time_to_first_token_p95_milliseconds: int | None = None
    time_per_output_token_p95_milliseconds: int | None = None
    attainment_percent: int | None = None


@dataclass(frozen=True, slots=True)
class MetricsView:
    """What keeps the rescaling law from deciding."""

    health: str
    """Missing, Stale or Invalid (observe/traffic.py)."""

    subject: str
    message: str


class ProblemKind(StrEnum):
    """Why children are not as they should be. A kind decides which condition names it and whether waiting can help."""

    FOREIGN_OBJECT = "ForeignObject"
    """An object of a child's name belongs to somebody else. Never adopted or overwritten."""

    INVALID_SPEC = "InvalidSpec"
    """The API server took the spec, but the operator can't build from it."""

    REJECTED = "Rejected"
    """The API server or an admission webhook refused a child, or a controller was refused its pods."""

    QUOTA_EXCEEDED = "QuotaExceeded"
    MISSING_OBJECT = "MissingObject"
    """A claim, Secret or ConfigMap that the spec names is not there."""

    IMAGE_PULL = "ImagePullFailed"
    UNSCHEDULABLE = "Unschedulable"
    CLAIM = "ClaimUnusable"
    """A pod finds no node for its claims: one is not bound, or its volume is of other nodes."""

    CRASHING = "Crashing"
    VOLUME = "VolumeFailed"
    NAMESPACE_GOING = "NamespaceTerminating"
    TRANSPORT = "TransportUnavailable"
    """transfer.required asks for a transport that a worker could not get."""


@dataclass(frozen=True, slots=True)
class Problem:
    kind: ProblemKind
    object: str
    """`Secret llm/api-keys`, `Pod llm/assistant-decode-1a2b3c4d-x`: what a reader would look at."""

    message: str
    """What is wrong, without names that change with every retry (pod hashes, times): status must not either."""

    pool: Pool | None = None
    """None: it concerns the router, or the whole model."""


@dataclass(frozen=True, slots=True)
class Observation:
    generation: int
    """metadata.generation of the spec that was read."""

    pods: tuple[PodView, ...] = ()
    deployments: tuple[DeploymentView, ...] = ()
    """Workers' of every revision, and the router's."""

    nodes: tuple[NodeView, ...] | None = None
    """None: the operator may not read nodes (namespaced mode)."""

    router_ready: int = 0
    """Ready router pods."""

    latency: LatencyView | None = None
    """None: no router could be asked, or the answers are too old."""

    problems: tuple[Problem, ...] = ()
    limits: tuple[str, ...] = ()
    """Why pools have fewer workers than they are to have, with numbers."""

    wanted: Mapping[str, str] = field(default_factory=dict)
    """Deployments that the spec asks for, by name: the revision of each. Empty: the spec can't be read."""

    contested: tuple[str, ...] = ()
    """What others keep writing that is ours to write."""

    metrics: MetricsView | None = None
    """None: nothing keeps it, or no law runs."""

    def in_role(self, role: Pool) -> tuple[PodView, ...]:
        """Pods that serve in `role` now."""
        return tuple(pod for pod in self.pods if pod.serving and pod.serves_as == role)

    def all_ready(self, deployment: DeploymentView) -> bool:
        """Whether every worker that a Deployment should have is there and ready."""
        of = [pod for pod in self.pods if pod.pool == deployment.pool and pod.revision == deployment.revision]
        staying = [pod for pod in of if not pod.terminating]
        return len(staying) >= deployment.replicas > 0 and all(pod.ready for pod in staying)

    def of_pool(self, pool: Pool) -> tuple[PodView, ...]:
        """Pods whose home is `pool`, in any state."""
        return tuple(pod for pod in self.pods if pod.pool == pool)
