"""DisaggregatedModel v1alpha1 (group serving.forebay.dev): what a user writes. The CRD is generated from these classes.

Every list and string is bounded, unknown fields are refused, and there are no floats. Field names in YAML are the
camelCase of the names here. Instances are frozen: autoscaled counts live in status, never in spec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from forebay_operator.api.labels import Pool
from forebay_operator.api.quantity import format_bytes, parse_bytes
from forebay_operator.api.ratio import parse_ratio
from forebay_operator.api.source import ModelSource, parse_source

LEASE_SECONDS = 30
"""How long a prefill worker keeps a request's KV blocks for the decode worker, unless a heartbeat extends it."""

PULL_MARGIN_SECONDS = 5
"""A decode worker gives a pull up this long before its lease ends."""

KV_MEMORY_MIN_BYTES = 2**20
KV_MEMORY_MAX_BYTES = 2**44

RESERVED_ENV = frozenset(
    {
        "API_KEYS_FILE",
        "BIND_ADDRESS",
        "CUDA_VISIBLE_DEVICES",
        "MODEL_DIR",
        "OMP_NUM_THREADS",
        "POD_IP",
        "POD_NAME",
        "PORT",
        "TOKEN_FILE",
        "WORKERS_FILE",
    }
)
"""Variables that the operator sets; engine.env may not name them."""

_JSON_LIMIT = 32 * 1024

T = TypeVar("T")


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        parse(text)
        return text

    return check


def _plain_json(value: T) -> T:
    def walk(node: Any, path: str) -> None:
        if isinstance(node, float):
            raise ValueError(f"{path or 'value'} is the float {node}; write it as an integer, or quoted as a string")
        if isinstance(node, dict):
            for key, child in node.items():
                if not isinstance(key, str):
                    raise ValueError(f"{path or 'value'} has the key {key!r}, which is no string; quote it")
                walk(child, f"{path}.{key}".lstrip("."))
        elif isinstance(node, list):
            for index, child in enumerate(node):
                walk(child, f"{path}[{index}]")
        elif node is not None and not isinstance(node, (str, int)):
            raise ValueError(f"{path or 'value'} is a {type(node).__name__}, which JSON does not have; quote it")

    walk(value, "")
    size = len(json.dumps(value))
    if size > _JSON_LIMIT:
        raise ValueError(f"is {size} bytes as JSON; at most {_JSON_LIMIT}")
    return value


def _pod_template(value: dict[str, Any]) -> dict[str, Any]:
    for key, part in value.items():
        if key not in ("metadata", "spec"):
            raise ValueError(f"{key} is no part of a pod template; write metadata and spec")
        if not isinstance(part, dict):
            raise ValueError(f"{key} must be a map of fields")
    for key in ("labels", "annotations"):
        if not isinstance(value.get("metadata", {}).get(key, {}), dict):
            raise ValueError(f"metadata.{key} must be a map of strings")
    containers = value.get("spec", {}).get("containers", [{"name": ""}])
    if not isinstance(containers, list) or not all(isinstance(c, dict) and "name" in c for c in containers):
        raise ValueError("spec.containers must be a list of containers with names: they are merged by name")
    return value


Quantity = Annotated[str, Field(min_length=1, max_length=24), AfterValidator(_checked(parse_bytes))]
RatioText = Annotated[str, Field(min_length=3, max_length=7), AfterValidator(_checked(parse_ratio))]
Source = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_checked(parse_source))]
JsonObject = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(_plain_json)]
"""A part of the Kubernetes API passed on as it is."""

PodTemplate = Annotated[JsonObject, AfterValidator(_pod_template)]

DnsLabel = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", description="a DNS label")
]
ResourceName = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[a-z0-9]([-a-z0-9./]*[a-z0-9])?$", description="a resource name"),
]
LabelText = Annotated[str, Field(max_length=253)]
Replicas = Annotated[int, Field(ge=1, le=512)]


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


class ObjectMeta(Strict):
    name: DnsLabel
    namespace: DnsLabel = "default"
    labels: dict[LabelText, LabelText] = Field(default_factory=dict, max_length=64)
    annotations: dict[LabelText, Annotated[str, Field(max_length=65536)]] = Field(default_factory=dict, max_length=64)


class Model(Strict):
    source: Source | None = None
    """Where the files are. May be left out only with a Simulated engine, which reads none."""

    served_name: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$",
        description="a model name: letters, digits and -._/:",
    )
    """What clients write in `model`."""

    max_model_len: int | None = Field(default=None, ge=16, le=16_777_216)
    """Prompt and answer together, in tokens. None: the model's own limit."""

    dtype: Literal["Auto", "Float32", "BFloat16", "Float16"] = "Auto"

    def parsed_source(self) -> ModelSource | None:
        return None if self.source is None else parse_source(self.source)


class KVCache(Strict):
    memory: Quantity = "1Gi"
    """Of each worker, in GPU memory or, without a GPU, in RAM."""

    block_size: Literal[16, 32, 64, 128] = 16
    """Tokens in one KV block."""

    @field_validator("memory")
    @classmethod
    def _usable(cls, memory: str) -> str:
        if not KV_MEMORY_MIN_BYTES <= parse_bytes(memory) <= KV_MEMORY_MAX_BYTES:
            low, high = format_bytes(KV_MEMORY_MIN_BYTES), format_bytes(KV_MEMORY_MAX_BYTES)
            raise ValueError(f"{memory!r} is out of range; must be from {low} to {high}")
        return memory


class EnvVar(Strict):
    name: str = Field(
        min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="a variable name: A-Z, 0-9 and _"
    )
    value: Annotated[str, Field(max_length=4096)] | None = None
    value_from: JsonObject | None = None

    @model_validator(mode="after")
    def _one(self) -> EnvVar:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("set exactly one of value and valueFrom")
        if self.name in RESERVED_ENV:
            raise ValueError(f"{self.name} is set by Forebay itself; choose another name")
        return self


class Simulated(Strict):
    performance_model: DnsLabel = "slow"
    """Name of the timings that the simulated engine follows."""


class Engine(Strict):
    type: Literal["Native", "Simulated", "VLLM", "TritonServer"] = "Native"
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    kv_cache: KVCache = KVCache()
    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of one worker without a GPU."""

    max_running_requests: int | None = Field(default=None, ge=1, le=4096)
    max_batched_tokens: int | None = Field(default=None, ge=16, le=1_048_576)
    """Tokens of one step; what decode leaves of it is the chunk of chunked prefill."""

    env: list[EnvVar] = Field(default_factory=list, max_length=64)
    simulated: Simulated | None = None

    @field_validator("type")
    @classmethod
    def _supported(cls, engine: str) -> str:
        if engine in ("VLLM", "TritonServer"):
            raise ValueError(f"{engine} is not supported yet; use Native or Simulated")
        return engine

    @model_validator(mode="after")
    def _consistent(self) -> Engine:
        if self.simulated is not None and self.type != "Simulated":
            raise ValueError(f"simulated needs type: Simulated, not {self.type}; remove it or change the type")
        names = [variable.name for variable in self.env]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"env names {', '.join(twice)} more than once; keep one of each")
        return self


class Objectives(Strict):
    time_to_first_token_milliseconds: int = Field(default=1000, ge=1, le=3_600_000)
    time_per_output_token_milliseconds: int = Field(default=100, ge=1, le=600_000)
    attainment_percent: int = Field(default=98, ge=1, le=100)


class Gpus(Strict):
    resource: ResourceName = "nvidia.com/gpu"
    count: int = Field(default=1, ge=0, le=16)
    """0: the worker runs on CPU."""


class PoolSpec(Strict):
    replicas: Replicas | None = None
    """A fixed number of workers. Exclusive with bounds in scaling.<pool>."""

    gpus: Gpus | None = None
    """Of each worker. None: one nvidia.com/gpu, or none at all with a Simulated engine."""

    node_selector: dict[LabelText, LabelText] = Field(default_factory=dict, max_length=32)
    tolerations: list[JsonObject] = Field(default_factory=list, max_length=32)
    pod_template: PodTemplate | None = None
    """Merged over the built pod template: maps by key, lists of named items by name, null removes."""


class Rdma(Strict):
    resource: ResourceName = "rdma/hca"
    count: int = Field(default=1, ge=1, le=16)
    networks: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(default_factory=list, max_length=16)


class Transfer(Strict):
    transport: Literal["Auto", "RDMA", "NVLink", "TCP", "SharedMemory"] = "Auto"
    required: bool = False
    """A worker that got a worse transport than the one named never becomes ready."""

    rdma: Rdma | None = None
    timeout_seconds: int = Field(default=20, ge=1, le=LEASE_SECONDS - PULL_MARGIN_SECONDS)
    """For one pull. Shorter than the lease of 30 s by the margin of 5 s at which a pull is given up anyway."""

    @model_validator(mode="after")
    def _named(self) -> Transfer:
        if self.required and self.transport == "Auto":
            raise ValueError(
                "required: true needs a named transport; set transport to RDMA, NVLink, TCP or SharedMemory"
            )
        return self


class Bounds(Strict):
    min_replicas: Replicas = 1
    max_replicas: Replicas

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} is over maxReplicas {self.max_replicas}; lower it or raise the other"
            )
        return self


class RatioBounds(Strict):
    min: RatioText = "1:999"
    max: RatioText = "999:1"

    @model_validator(mode="after")
    def _ordered(self) -> RatioBounds:
        if not parse_ratio(self.min).at_most(parse_ratio(self.max)):
            raise ValueError(f"min {self.min} has a larger share of prefill than max {self.max}; swap them")
        return self


class Metrics(Strict):
    source: Literal["Endpoints", "Prometheus"] = "Endpoints"
    url: (
        Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s]+$", description="an http or https URL")] | None
    ) = None
    auth: JsonObject | None = None

    @model_validator(mode="after")
    def _address(self) -> Metrics:
        if (self.source == "Prometheus") != (self.url is not None):
            raise ValueError("url goes with source: Prometheus, and only with it")
        return self


class Scaling(Strict):
    mode: Literal["Auto", "Recommend", "Off"] = "Auto"
    prefill: Bounds | None = None
    decode: Bounds | None = None
    max_gpus: int | None = Field(default=None, ge=1, le=8192, alias="maxGPUs")
    ratio: RatioBounds = RatioBounds()
    role_switching: Literal["Enabled", "Disabled"] = "Enabled"
    behavior: JsonObject | None = None
    metrics: Metrics = Metrics()
    pause: Literal["None", "All", "ScaleUp", "ScaleDown"] = "None"


class SecretKeyRef(Strict):
    name: DnsLabel
    key: Annotated[
        str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$", description="a key of a Secret")
    ] = "keys"


class Router(Strict):
    replicas: int = Field(default=2, ge=1, le=64)
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    fallback: Literal["BothPhases", "Refuse"] = "BothPhases"
    """Without a worker in one of the roles: the other serves both phases, or requests get 503."""

    api_keys_secret_ref: SecretKeyRef | None = None
    """One key a line. None: no key is asked for."""

    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    pod_template: PodTemplate | None = None


class Drain(Strict):
    timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    policy: Literal["Finish", "Move"] = "Finish"


class Rollout(Strict):
    max_unavailable: int = Field(default=1, ge=0, le=512)
    max_surge: int = Field(default=0, ge=0, le=512)

    @model_validator(mode="after")
    def _moves(self) -> Rollout:
        if self.max_unavailable == 0 and self.max_surge == 0:
            raise ValueError("maxUnavailable and maxSurge are both 0, so no rollout could ever move; set one to 1")
        return self


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
