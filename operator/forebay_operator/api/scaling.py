"""spec.scaling: bounds, behaviour and sources of the rescaling of the two pools."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from forebay_operator.api.fields import ObjectName, RatioText, Replicas, SecretKey, Strict, schema
from forebay_operator.api.ratio import parse_ratio
from forebay_operator.api.rule import Rule


class Bounds(Strict):
    min_replicas: Replicas = 1
    max_replicas: Replicas

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas is over maxReplicas; lower it or raise the other"),
    )

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

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "int(self.min.split(':')[0]) * int(self.max.split(':')[1]) "
            "<= int(self.max.split(':')[0]) * int(self.min.split(':')[1])",
            "min has a larger share of prefill than max; swap them",
        ),
    )

    @model_validator(mode="after")
    def _ordered(self) -> RatioBounds:
        if not parse_ratio(self.min).at_most(parse_ratio(self.max)):
            raise ValueError(f"min {self.min} has a larger share of prefill than max {self.max}; swap them")
        return self


class ScalingPolicy(Strict):
    """At most `value` workers, or percent of the workers there are, in `periodSeconds`."""

    type: Literal["Pods", "Percent"]
    value: int = Field(ge=1, le=1000)
    period_seconds: int = Field(ge=1, le=1800)


class ScalingRules(Strict):
    """One direction. A field left out: the law's own figure."""

    stabilization_window_seconds: int | None = Field(default=None, ge=0, le=3600)
    """For so long a need must have lasted before it is acted on."""

    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    """Of several policies the one that allows the most or the fewest. Disabled: never in this direction."""

    policies: Annotated[list[ScalingPolicy], Field(max_length=8)] = Field(default_factory=list)
    tolerance_percent: int | None = Field(default=None, ge=0, le=100)
    """How far demand may be from what is there before anything moves."""


class Behavior(Strict):
    scale_up: ScalingRules = ScalingRules()
    scale_down: ScalingRules = ScalingRules()


class BearerTokenRef(Strict):
    name: ObjectName
    key: SecretKey = "token"


class MetricsAuth(Strict):
    bearer_token_secret_ref: BearerTokenRef
    """A Secret in the model's namespace. Its value is sent as `Authorization: Bearer`."""


_OURS: Final = "(?i)^(authorization|connection|content-length|host|transfer-encoding)$"
"""Headers that are the client's own, and the token's."""


class HttpHeader(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", description="a header's name")]
    value: Annotated[str, Field(max_length=1024, pattern=r"^[!-~]([ -~]*[!-~])?$", description="printable ASCII")]

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(f"!self.name.matches('{_OURS}')", "may not be set; a bearer token goes into auth"),
    )

    @model_validator(mode="after")
    def _free(self) -> HttpHeader:
        if re.search(_OURS, self.name):
            raise ValueError(f"{self.name} may not be set; a bearer token goes into auth")
        return self


class Metrics(Strict):
    source: Literal["Endpoints", "Prometheus"] = "Endpoints"
    url: (
        Annotated[str, Field(max_length=2048, pattern=r"^https?://[^\s]+$", description="an http or https URL")] | None
    ) = None
    auth: MetricsAuth | None = None
    headers: (
        Annotated[
            list[HttpHeader],
            Field(min_length=1, max_length=8),
            schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
        ]
        | None
    ) = None
    """Sent with each query, such as the tenant's `X-Scope-OrgID`. No place for secrets."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("(self.source == 'Prometheus') == has(self.url)", "url goes with source: Prometheus, and only with it"),
        Rule("!has(self.auth) || has(self.url)", "auth needs a url to be sent to; remove it"),
        Rule("!has(self.headers) || has(self.url)", "headers need a url to be sent to; remove them"),
        Rule(
            "!has(self.auth) || !has(self.url) || self.url.startsWith('https://')",
            "auth over http shows the token to the network; use an https url",
        ),
    )

    @model_validator(mode="after")
    def _address(self) -> Metrics:
        if (self.source == "Prometheus") != (self.url is not None):
            raise ValueError("url goes with source: Prometheus, and only with it")
        if self.auth is not None and self.url is None:
            raise ValueError("auth needs a url to be sent to; remove it")
        if self.headers is not None and self.url is None:
            raise ValueError("headers need a url to be sent to; remove them")
        if self.auth is not None and not (self.url or "").startswith("https://"):
            raise ValueError("auth over http shows the token to the network; use an https url")
        return self


class Scaling(Strict):
    mode: Literal["Auto", "Recommend", "Off"] = "Auto"
    """Recommend: decisions go to status and nothing else happens."""

    prefill: Bounds | None = None
    decode: Bounds | None = None
    max_gpus: int | None = Field(default=None, ge=1, le=8192, alias="maxGPUs")
    """Of both pools together, pods that are leaving included."""

    ratio: RatioBounds = RatioBounds()
    role_switching: Literal["Enabled", "Disabled"] = "Enabled"
    behavior: Behavior | None = None
    metrics: Metrics = Metrics()
    performance_model: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Text of a file that `forebay calibrate` wrote, as it is: the workers' speed that the law starts from. What it
    learns of them takes its place; another text starts it anew."""

    pause: Literal["None", "All", "ScaleUp", "ScaleDown"] = "None"
