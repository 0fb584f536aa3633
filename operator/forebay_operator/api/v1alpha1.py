"""DisaggregatedModel v1alpha1 (group serving.forebay.dev): what a user writes. The CRD is generated from these classes.

Every list and string is bounded, unknown fields are refused, and there are no floats. Field names in YAML are the
camelCase of the names here. Instances are frozen: autoscaled counts live in status, never in spec. A rule that spans
fields is there twice, as CEL for the API server (`rules`) and as a validator: a test gives both the same examples.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from forebay_operator.api.engine import (
    KV_MEMORY_MAX_BYTES,
    KV_MEMORY_MIN_BYTES,
    RESERVED_ENV,
    Engine,
    EnvVar,
    KVCache,
    Model,
    Simulated,
)
from forebay_operator.api.fields import (
    DnsLabel,
    Image,
    LabelText,
    Namespace,
    ObjectName,
    PodTemplate,
    ResourceName,
    SecretKey,
    Strict,
)
from forebay_operator.api.labels import Pool
from forebay_operator.api.pool import Gpus, PoolSpec, Toleration
from forebay_operator.api.rule import Rule
from forebay_operator.api.scaling import Behavior, Bounds, Metrics, RatioBounds, Scaling, ScalingPolicy, ScalingRules

__all__ = [
    "KV_MEMORY_MAX_BYTES",
    "KV_MEMORY_MIN_BYTES",
    "LEASE_SECONDS",
    "PULL_MARGIN_SECONDS",
    "RESERVED_ENV",
    "Behavior",
    "Bounds",
    "DisaggregatedModel",
    "DisaggregatedModelSpec",
    "Drain",
    "Engine",
    "EnvVar",
    "Gpus",
    "KVCache",
    "Metrics",
    "Model",
    "ObjectMeta",
    "Objectives",
    "PoolSpec",
    "RatioBounds",
    "Rdma",
    "Rollout",
    "Router",
    "Scaling",
    "ScalingPolicy",
    "ScalingRules",
    "SecretKeyRef",
    "Simulated",
    "Toleration",
    "Transfer",
]

LEASE_SECONDS = 30
"""How long a prefill worker keeps a request's KV blocks for the decode worker, unless a heartbeat extends it."""

PULL_MARGIN_SECONDS = 5
"""A decode worker gives a pull up this long before its lease ends."""


class ObjectMeta(Strict):
    name: DnsLabel
    namespace: Namespace = "default"
    labels: dict[LabelText, LabelText] = Field(default_factory=dict, max_length=64)
    annotations: dict[LabelText, Annotated[str, Field(max_length=65536)]] = Field(default_factory=dict, max_length=64)


class Objectives(Strict):
    time_to_first_token_milliseconds: int = Field(default=1000, ge=0, le=3_600_000)
    """0: no such objective. Without one of the two the split follows demand alone (NoObjectives in status.decision);
    without this one no prompt overflows to a decode worker."""

    time_per_output_token_milliseconds: int = Field(default=100, ge=0, le=600_000)
    """0: no such objective, so a decode worker holds as many requests as fit."""

    attainment_percent: int = Field(default=98, ge=1, le=100)
    """Share of requests that should meet the objectives there are; without any, that should be served at all."""

    @property
    def ttft_seconds(self) -> float | None:
        """None: there is no such objective."""
        return self.time_to_first_token_milliseconds / 1e3 or None

    @property
    def tpot_seconds(self) -> float | None:
        """None: there is no such objective."""
        return self.time_per_output_token_milliseconds / 1e3 or None


class Rdma(Strict):
    resource: ResourceName = "rdma/hca"
    count: int = Field(default=1, ge=1, le=16)
    networks: Annotated[list[Annotated[str, Field(min_length=1, max_length=253)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    """Secondary networks, as NetworkAttachmentDefinitions are named: `name` or `namespace/name`."""


class Transfer(Strict):
    transport: Literal["Auto", "RDMA", "NVLink", "TCP", "SharedMemory"] = "Auto"
    required: bool = False
    """A worker that got a worse transport than the one named never becomes ready."""

    rdma: Rdma | None = None
    timeout_seconds: int = Field(default=20, ge=1, le=LEASE_SECONDS - PULL_MARGIN_SECONDS)
    """For one pull. Shorter than the lease of 30 s by the margin of 5 s at which a pull is given up anyway."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!self.required || self.transport != 'Auto'",
            "required: true needs a named transport; set transport to RDMA, NVLink, TCP or SharedMemory",
        ),
        Rule(
            "!has(self.rdma) || self.transport in ['Auto', 'RDMA']",
            "rdma asks for devices that this transport never uses; remove it or set transport to Auto or RDMA",
        ),
    )

    @model_validator(mode="after")
    def _named(self) -> Transfer:
        if self.required and self.transport == "Auto":
            raise ValueError(
                "required: true needs a named transport; set transport to RDMA, NVLink, TCP or SharedMemory"
            )
        if self.rdma is not None and self.transport not in ("Auto", "RDMA"):
            raise ValueError(
                f"rdma asks for devices that transport {self.transport} never uses; "
                "remove it or set transport to Auto or RDMA"
            )
        return self


class SecretKeyRef(Strict):
    name: ObjectName
    key: SecretKey = "keys"


class Router(Strict):
    replicas: int = Field(default=2, ge=1, le=64)
    image: Image | None = None
    fallback: Literal["BothPhases", "Refuse"] = "BothPhases"
    """Without a worker in one of the roles: the other serves both phases, or requests get 503."""

    convertible: Literal["Never", "Overflow", "Always"] = "Overflow"
    """When a decode worker may compute a prompt itself, if it can without making running streams too slow. Overflow:
    when the prefill pool's queue takes most of the objective. Always: also short prompts, which then move no KV."""

    refusal_percent: int | None = Field(default=None, ge=50, le=10_000)
    """A request whose first token is expected later than so many percent of the objective gets 429 at once. None: all
    requests are served, however late."""

    api_keys_secret_ref: SecretKeyRef | None = None
    """One key a line. None: no key is asked for."""

    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    pod_template: PodTemplate | None = None
    """As for the pools; the container is named `router`."""


class Drain(Strict):
    timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """For the requests of a worker that leaves; those left at its end continue on another worker."""

    policy: Literal["Finish", "Move"] = "Finish"
    """Move: streams continue on another worker at once."""


class Rollout(Strict):
    max_unavailable: int = Field(default=1, ge=0, le=512)
    max_surge: int = Field(default=0, ge=0, le=512)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.maxUnavailable > 0 || self.maxSurge > 0",
            "maxUnavailable and maxSurge are both 0, so no rollout could ever move; set one to 1",
        ),
    )

    @model_validator(mode="after")
    def _moves(self) -> Rollout:
        if self.max_unavailable == 0 and self.max_surge == 0:
            raise ValueError("maxUnavailable and maxSurge are both 0, so no rollout could ever move; set one to 1")
        return self


def _cel(pool: Pool, end: Literal["min", "max"]) -> str:
    """Fewest or most workers of a pool, as CEL."""
    sized, bounds = f"self.{pool}.replicas", f"self.scaling.{pool}"
    # Without a size the rule about sizes speaks; this one then only must not fail.
    return f"(has({sized}) ? {sized} : has({bounds}) ? {bounds}.{end}Replicas : 1)"


def _cel_gpus(pool: Pool) -> str:
    return f"(has(self.{pool}.gpus) ? self.{pool}.gpus.count : self.engine.type == 'Simulated' ? 0 : 1)"


def _pool_rules(pool: Pool) -> tuple[Rule, ...]:
    sized, bounds = f"has(self.{pool}.replicas)", f"has(self.scaling.{pool})"
    return (
        Rule(f"!({sized} && {bounds})", f"{pool}.replicas and scaling.{pool} are both set; keep one of them"),
        Rule(
            f"{sized} || {bounds}",
            f"{pool} has no size; set {pool}.replicas (fixed) or scaling.{pool} (bounds)",
        ),
        Rule(
            f"self.engine.type != 'Simulated' || {_cel_gpus(pool)} == 0",
            f"{pool}.gpus.count is not 0; a Simulated engine uses none: remove gpus",
        ),
    )


_NOTHING_TO_REFUSE = (
    "router.refusalPercent is a share of objectives.timeToFirstTokenMilliseconds, which is 0 (none); "
    "remove it or set that objective"
)


class DisaggregatedModelSpec(Strict):
    model: Model
    engine: Engine = Engine()
    objectives: Objectives = Objectives()
    replicas: int | None = Field(default=None, ge=2, le=1024)
    """Sum of the workers of both pools; what /scale sets. None: the pools' own figures."""

    prefill: PoolSpec = PoolSpec()
    decode: PoolSpec = PoolSpec()
    transfer: Transfer = Transfer()
    scaling: Scaling = Scaling()
    router: Router = Router()
    drain: Drain = Drain()
    rollout: Rollout = Rollout()
    network_policy: Literal["Enabled", "Disabled"] = "Enabled"
    """Whether the model's pods get NetworkPolicies. RDMA and secondary networks bypass them in any case."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *_pool_rules("prefill"),
        *_pool_rules("decode"),
        Rule(
            "self.engine.type != 'Native' || has(self.model.source)",
            "model.source is missing; a Native engine needs one, such as pvc://claim/path",
        ),
        Rule(
            f"!has(self.replicas) || (self.replicas >= {_cel('prefill', 'min')} + {_cel('decode', 'min')} "
            f"&& self.replicas <= {_cel('prefill', 'max')} + {_cel('decode', 'max')})",
            "replicas is outside what the pools allow together; change it or their bounds",
        ),
        Rule(
            "!has(self.scaling.maxGPUs) || "
            f"{_cel_gpus('prefill')} * {_cel('prefill', 'min')} + {_cel_gpus('decode')} * {_cel('decode', 'min')} "
            "<= self.scaling.maxGPUs",
            "scaling.maxGPUs is below the GPUs of the fewest workers; "
            "raise it or lower replicas, minReplicas or gpus.count",
        ),
        Rule(
            "!self.transfer.required || self.engine.type != 'Simulated'",
            "transfer.required needs a real transport, which a Simulated engine has none of; remove it",
        ),
        Rule(
            "!has(self.router.refusalPercent) || self.objectives.timeToFirstTokenMilliseconds > 0", _NOTHING_TO_REFUSE
        ),
    )

    def pool(self, pool: Pool) -> PoolSpec:
        return self.prefill if pool == "prefill" else self.decode

    def bounds(self, pool: Pool) -> Bounds:
        """Fewest and most workers of a pool; equal when its `replicas` are fixed."""
        fixed = self.pool(pool).replicas
        if fixed is not None:
            return Bounds.model_validate({"minReplicas": fixed, "maxReplicas": fixed})
        bounds = self.scaling.prefill if pool == "prefill" else self.scaling.decode
        if bounds is None:
            raise AssertionError(f"{pool} has neither replicas nor bounds; validation lets none such pass")
        return bounds

    def gpus_per_worker(self, pool: Pool) -> Gpus:
        gpus = self.pool(pool).gpus
        if gpus is not None:
            return gpus
        return Gpus(count=0) if self.engine.type == "Simulated" else Gpus()

    @model_validator(mode="after")
    def _consistent(self) -> DisaggregatedModelSpec:
        self._check_pool("prefill", self.prefill, self.scaling.prefill)
        self._check_pool("decode", self.decode, self.scaling.decode)
        if self.engine.type == "Native" and self.model.source is None:
            raise ValueError("model.source is missing; a Native engine needs one, such as cache://smollm2-135m")
        low, high = self.bounds("prefill"), self.bounds("decode")
        if self.replicas is not None:
            fewest = low.min_replicas + high.min_replicas
            most = low.max_replicas + high.max_replicas
            if not fewest <= self.replicas <= most:
                raise ValueError(
                    f"replicas {self.replicas} is outside what the pools allow together, {fewest} to {most}"
                )
        if self.scaling.max_gpus is not None:
            needed = sum(
                self.gpus_per_worker(pool).count * self.bounds(pool).min_replicas for pool in ("prefill", "decode")
            )
            if needed > self.scaling.max_gpus:
                raise ValueError(
                    f"scaling.maxGPUs {self.scaling.max_gpus} is below the {needed} GPUs of the fewest workers; "
                    "raise it or lower replicas, minReplicas or gpus.count"
                )
        if self.transfer.required and self.engine.type == "Simulated":
            raise ValueError(
                "transfer.required needs a real transport, which a Simulated engine has none of; remove it"
            )
        if self.router.refusal_percent is not None and self.objectives.ttft_seconds is None:
            raise ValueError(_NOTHING_TO_REFUSE)
        return self

    def _check_pool(self, name: Pool, pool: PoolSpec, bounds: Bounds | None) -> None:
        if pool.replicas is not None and bounds is not None:
            raise ValueError(f"{name}.replicas and scaling.{name} are both set; keep one of them")
        if pool.replicas is None and bounds is None:
            raise ValueError(f"{name} has no size; set {name}.replicas (fixed) or scaling.{name} (bounds)")
        if self.engine.type == "Simulated" and pool.gpus is not None and pool.gpus.count > 0:
            raise ValueError(f"{name}.gpus.count is {pool.gpus.count}; a Simulated engine uses none: remove gpus")


class DisaggregatedModel(Strict):
    api_version: Literal["serving.forebay.dev/v1alpha1"]
    kind: Literal["DisaggregatedModel"]
    metadata: ObjectMeta
    spec: DisaggregatedModelSpec

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.metadata.name.size() <= 63 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            "metadata.name must be a DNS label: at most 63 of a-z, 0-9 and '-', with a letter first",
        ),
    )
