"""A pool: how many workers, on which nodes, with how many GPUs each."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from forebay_operator.api.fields import (
    INT32_MAX,
    DnsLabel,
    JsonObject,
    LabelMap,
    LabelText,
    ObjectName,
    PodTemplate,
    Replicas,
    ResourceName,
    Strict,
)
from forebay_operator.api.rule import Rule


class Gpus(Strict):
    resource: ResourceName = "nvidia.com/gpu"
    count: int = Field(default=1, ge=0, le=16)
    """0: the worker runs on CPU."""


class Toleration(Strict):
    key: LabelText | None = None
    """Left out, with operator Exists: every taint."""

    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelText | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0, le=INT32_MAX)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.operator == 'Equal' || !has(self.value)", "value goes with operator: Equal; remove it"),
        Rule("has(self.key) || self.operator == 'Exists'", "without a key the operator must be Exists"),
    )

    @model_validator(mode="after")
    def _matches(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("value goes with operator: Equal; remove it")
        if self.key is None and self.operator != "Exists":
            raise ValueError("without a key the operator must be Exists")
        return self


class PoolSpec(Strict):
    replicas: Replicas | None = None
    """A fixed number of workers. Exclusive with bounds in scaling.<pool>."""

    gpus: Gpus | None = None
    """Of each worker. None: one nvidia.com/gpu, or none at all with a Simulated engine."""

    node_selector: LabelMap = Field(default_factory=dict)
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list)
    affinity: JsonObject | None = None
    """As in a pod's spec."""

    topology_spread_constraints: Annotated[list[JsonObject], Field(max_length=16)] = Field(default_factory=list)
    """As in a pod's spec. Without a labelSelector, one that selects this pool's workers is put in."""

    priority_class_name: ObjectName | None = None
    runtime_class_name: DnsLabel | None = None
    pod_template: PodTemplate | None = None
    """Merged over the built pod template: maps by key, lists of named items by name; `$patch: delete` removes."""
