"""spec.model and spec.engine: what is served, and by which program with how much memory."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from forebay_operator.api.fields import Image, ObjectName, Quantity, SecretKey, Source, Strict, schema
from forebay_operator.api.quantity import format_bytes, parse_bytes
from forebay_operator.api.rule import Rule
from forebay_operator.api.source import ModelSource, parse_source

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
        "POD_NAMESPACE",
        "PORT",
        "TOKEN_FILE",
        "UCX_TCP_PORT_RANGE",
        "WORKERS_FILE",
    }
)
"""Variables that the operator sets; engine.env may not name them."""


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

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "quantity(self.memory).compareTo(quantity('1Mi')) >= 0 "
            "&& quantity(self.memory).compareTo(quantity('16Ti')) <= 0",
            "memory is out of range; must be from 1Mi to 16Ti",
        ),
    )

    @field_validator("memory")
    @classmethod
    def _usable(cls, memory: str) -> str:
        if not KV_MEMORY_MIN_BYTES <= parse_bytes(memory) <= KV_MEMORY_MAX_BYTES:
            low, high = format_bytes(KV_MEMORY_MIN_BYTES), format_bytes(KV_MEMORY_MAX_BYTES)
            raise ValueError(f"{memory!r} is out of range; must be from {low} to {high}")
        return memory


class KeyRef(Strict):
    name: ObjectName
    key: SecretKey
    optional: bool | None = None


class FieldRef(Strict):
    field_path: str = Field(min_length=1, max_length=253)
    api_version: str | None = Field(default=None, min_length=1, max_length=63)


class EnvSource(Strict):
    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size() == 1",
            "set exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> EnvSource:
        if [self.secret_key_ref, self.config_map_key_ref, self.field_ref].count(None) != 2:
            raise ValueError("set exactly one of secretKeyRef, configMapKeyRef and fieldRef")
        return self


class EnvVar(Strict):
    name: str = Field(
        min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="a variable name: A-Z, 0-9 and _"
    )
    value: Annotated[str, Field(max_length=4096)] | None = None
    value_from: EnvSource | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("has(self.value) != has(self.valueFrom)", "set exactly one of value and valueFrom"),
        Rule(
            f"!(self.name in [{', '.join(repr(name) for name in sorted(RESERVED_ENV))}])",
            "this variable is set by Forebay itself; choose another name",
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> EnvVar:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("set exactly one of value and valueFrom")
        if self.name in RESERVED_ENV:
            raise ValueError(f"{self.name} is set by Forebay itself; choose another name")
        return self


PerformanceModel = Literal[
    "a100-llama-70b",
    "a100-llama-8b",
    "h100-llama-70b",
    "h100-llama-8b",
    "h100-qwen-32b",
    "h100-qwen-7b",
    "h200-llama-70b",
    "h200-llama-8b",
    "instant",
    "slow",
]
"""Those that the engine knows (forebay_engine.perf.names(); a test compares them)."""


class Simulated(Strict):
    performance_model: PerformanceModel = "slow"
    """Name of the timings that the simulated engine follows."""


class Engine(Strict):
    type: Literal["Native", "Simulated", "VLLM", "TritonServer"] = "Native"
    image: Image | None = None
    kv_cache: KVCache = KVCache()
    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads of one worker without a GPU."""

    max_running_requests: int | None = Field(default=None, ge=1, le=4096)
    """That one worker computes at a time. Left out: 64."""

    max_batched_tokens: int | None = Field(default=None, ge=16, le=1_048_576)
    """Tokens of one step; what decode leaves of it is the chunk of chunked prefill. Left out: 512."""

    env: Annotated[
        list[EnvVar],
        Field(max_length=64),
        schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = Field(default_factory=list)
    simulated: Simulated | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.type in ['Native', 'Simulated']",
            "VLLM and TritonServer are not supported yet; use Native or Simulated",
        ),
        Rule(
            "!has(self.simulated) || self.type == 'Simulated'",
            "simulated needs type: Simulated; remove it or change the type",
        ),
    )

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
