"""Types and reasons of the conditions in status, once. docs/conditions.md says what each asks of a reader."""

from __future__ import annotations

from enum import StrEnum


class Type(StrEnum):
    """All of them are set on first sight, Unknown where nothing can be said yet."""

    READY = "Ready"
    """A request can be answered now. A rescale or rollout in progress does not change it."""

    RECONCILING = "Reconciling"
    """kstatus: children are being brought to the latest spec."""

    STALLED = "Stalled"
    """kstatus: no retry will help, a person must act."""

    POOLS_AVAILABLE = "PoolsAvailable"
    """Both roles have the workers that they should have."""

    PINNING_SATISFIED = "PinningSatisfied"
    """The cluster has nodes with the labels and GPUs that the pools ask for."""

    METRICS_AVAILABLE = "MetricsAvailable"
    """Load and latency are known and fresh. False: scaling holds."""

    SCALING_LIMITED = "ScalingLimited"
    """The law wants more or fewer workers than bounds, ratio or budget allow."""

    RATIO_WITHIN_BOUNDS = "RatioWithinBounds"
    TRANSPORT_READY = "TransportReady"
    """KV moves over the transport asked for, by the workers' own account."""

    PAUSED = "Paused"
    FOREIGN_WRITER = "ForeignWriter"
    """Somebody else keeps writing what the operator writes (an HPA on a child Deployment, another controller)."""


class Reason(StrEnum):
    # Ready
    SERVING = "Serving"
    SERVING_DEGRADED = "ServingDegraded"
    """One role has no worker; the other serves both phases."""

    NO_ROUTER = "NoRouterReady"
    NO_WORKER = "NoWorkerReady"
    NO_PREFILL_WORKER = "NoPrefillWorkerReady"
    NO_DECODE_WORKER = "NoDecodeWorkerReady"
    # Reconciling
    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    """Workers of an older revision are being replaced."""

    STARTING = "Starting"
    STALLED = "Stalled"
    """A person must act first: kstatus reads what is Reconciling as in progress, however long it takes."""

    # Stalled
    NOT_STALLED = "NotStalled"
    INVALID_SPEC = "InvalidSpec"
    FOREIGN_OBJECT = "ForeignObject"
    REJECTED = "Rejected"
    QUOTA_EXCEEDED = "QuotaExceeded"
    MISSING_OBJECT = "MissingObject"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    UNSCHEDULABLE = "Unschedulable"
    CRASHING = "Crashing"
    VOLUME_FAILED = "VolumeFailed"
    NAMESPACE_GOING = "NamespaceTerminating"
    # PoolsAvailable
    AT_TARGET = "AtTarget"
    BELOW_TARGET = "BelowTarget"
    BELOW_MINIMUM = "BelowMinimum"
    # PinningSatisfied
    NODES_MATCH = "NodesMatch"
    NO_MATCHING_NODE = "NoMatchingNode"
    TOO_FEW_GPUS = "TooFewGPUs"
    NODES_NOT_READABLE = "NodesNotReadable"
    """The operator runs in one namespace and may not read nodes."""

    # MetricsAvailable
    METRICS_FRESH = "Fresh"
    METRICS_MISSING = "Missing"
    METRICS_STALE = "Stale"
    METRICS_INVALID = "Invalid"
    """A source answers with what is no figure, or not such a source's."""

    # ScalingLimited
    WITHIN_LIMITS = "WithinLimits"
    SCALING_OFF = "ScalingOff"
    NOT_DECIDED = "NotDecided"
    NO_ROOM = "NoRoom"
    """Nodes or GPUs for more workers are not there."""

    TOO_MANY_REPLICAS = "TooManyReplicas"
    """Demand asks for more workers than bounds allow; named as an HPA's is."""

    TOO_FEW_REPLICAS = "TooFewReplicas"
    """Demand asks for fewer workers than bounds allow."""

    SPLIT_OUT_OF_BOUNDS = "SplitOutOfBounds"
    """The workers would be split otherwise, but for a role's bounds."""

    LIMITED_BY_RATIO = "LimitedByRatio"
    LIMITED_BY_BUDGET = "LimitedByBudget"
    LIMITED_BY_RATE = "LimitedByRate"
    LIMITED_BY_PAUSE = "LimitedByPause"

    # RatioWithinBounds
    WITHIN_BOUNDS = "WithinBounds"
    OUT_OF_BOUNDS = "OutOfBounds"
    NO_WORKERS = "NoWorkers"
    # TransportReady
    AS_ASKED = "AsAsked"
    IN_USE = "InUse"
    WORSE_THAN_ASKED = "WorseThanAsked"
    TRANSPORT_UNAVAILABLE = "TransportUnavailable"
    NOT_MEASURED = "NotMeasured"
    """No KV has moved yet, so nobody knows."""

    SIMULATED = "Simulated"
    # Paused
    NOT_PAUSED = "NotPaused"
    BY_SPEC = "PausedBySpec"
    # ForeignWriter
    SOLE_WRITER = "SoleWriter"
    CONTESTED = "Contested"


MESSAGE_LIMIT = 1024
"""Kubernetes takes 32768; nobody reads that."""


def truncate(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
