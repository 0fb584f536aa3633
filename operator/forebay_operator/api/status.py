"""The status of a DisaggregatedModel: what was observed, what was decided, and what a restarted operator must know.

Written by the operator alone. Unlike spec it is not judged on reading: an older operator may have written it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from forebay_operator.api.conditions import MESSAGE_LIMIT, Type
from forebay_operator.api.fields import INT32_MAX, Count, JsonObject, schema

Word = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
Text = Annotated[str, Field(max_length=MESSAGE_LIMIT)]
Time = Annotated[datetime, schema(format="date-time")]
Milliseconds = Annotated[int, Field(ge=0, le=INT32_MAX)]
Percent = Annotated[int, Field(ge=0, le=100)]
Generation = Annotated[int, Field(ge=-1, le=2**53)]


class StatusPart(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        use_attribute_docstrings=True,
    )


class Condition(StatusPart):
    """metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    status: Literal["True", "False", "Unknown"]
    reason: Word
    message: Text = ""
    last_transition_time: Time
    """When `status` changed last."""

    observed_generation: Generation


class PoolStatus(StatusPart):
    replicas: Count = 0
    """Workers whose home the pool is, ready or not."""

    serving: Count = 0
    """Ready workers in this role, from either pool."""

    target: Count = 0
    """Workers that should serve in this role: desired state, which role labels realise."""

    on_loan: Count = 0
    """Workers whose home the pool is and that serve in the other role."""

    summary: Annotated[str, Field(max_length=63)] = ""
    """serving/target, for the eye."""


class Latency(StatusPart):
    """Over the routers' last window, at the client's side of the router."""

    time_to_first_token_p95_milliseconds: Milliseconds | None = None
    time_per_output_token_p95_milliseconds: Milliseconds | None = None
    attainment_percent: Percent | None = None


class TransportStatus(StatusPart):
    in_use: Literal["RDMA", "NVLink", "TCP", "SharedMemory", "Simulated", "Mixed", "Unknown"] = "Unknown"
    """By the workers' own account, never inferred from the spec."""

    measured_gigabytes_per_second: Annotated[str, Field(max_length=16, pattern=r"^[0-9]+\.[0-9]$")] | None = None
    """Bytes over seconds of all transfers of the workers there are now."""


class Decision(StatusPart):
    """One decision of the scaling law, with what it was made from."""

    time: Time
    action: Word
    from_: Annotated[str, Field(max_length=63)] = Field(default="", alias="from")
    to: Annotated[str, Field(max_length=63)] = ""
    reason: Word
    message: Text = ""
    limited_by: Annotated[str, Field(max_length=128)] = ""
    inputs: JsonObject | None = None


class DisaggregatedModelStatus(StatusPart):
    observed_generation: Generation = -1
    """metadata.generation that this status speaks of; -1 until the operator has seen the object."""

    conditions: Annotated[
        list[Condition],
        Field(max_length=32),
        schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    summary: Text = ""
    """One line for people."""

    replicas: Count = 0
    """Workers of both pools; what /scale shows."""

    selector: Annotated[str, Field(max_length=512)] = ""
    """Of the workers' pods, for /scale."""

    prefill: PoolStatus | None = None
    decode: PoolStatus | None = None
    ratio: Annotated[str, Field(max_length=15)] = ""
    """prefill:decode, in serving workers."""

    latency: Latency | None = None
    transport: TransportStatus | None = None
    endpoint: Annotated[str, Field(max_length=512)] = ""
    """Base URL of the OpenAI API, inside the cluster."""

    decision: Decision | None = None
    decisions: Annotated[list[Decision], Field(max_length=20), schema(**{"x-kubernetes-list-type": "atomic"})] = Field(
        default_factory=list
    )
    """The ones before, newest first."""

    operation: JsonObject | None = None
    """A change of several steps in progress: what a restarted operator resumes."""

    memory: JsonObject | None = None
    """What the scaling law must remember over a restart."""

    def condition(self, type_: Type) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == type_), None)
