"""What an `up` says of itself: the control socket's answers, `forebay status -o json` and the live table."""

from __future__ import annotations

import msgspec


class ContainerStatus(msgspec.Struct, frozen=True):
    name: str
    pool: str | None
    """Home pool; null for the router."""

    role: str | None
    state: str
    """Starting | Running | Draining (it finishes its requests and leaves) | BackOff | Stopping | Stopped"""

    ready: bool
    port: int
    pid: int | None
    restarts: int
    last_exit: str | None
    log: str
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use, 0 to 1. This and all below are null while unknown."""

    kv_bytes_received: int | None = None
    transport: str | None = None
    last_error: str | None = None
    """What it said last before it last ended, or how it ended."""


class DecisionStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The rescaling law's last word that said something, with what it was made from."""

    time: str
    reason: str
    message: str
    to: str
    from_: str = msgspec.field(name="from")
    limited_by: list[str] = []
    inputs: dict[str, float] = {}
    rejected: dict[str, float] = {}
    """Splits that were considered, and the share of requests each would have gained."""


class UpStatus(msgspec.Struct, frozen=True):
    name: str
    model: str
    """metadata.name of the DisaggregatedModel."""

    served_name: str
    endpoint: str
    """Base URL of the OpenAI API."""

    phase: str
    """Starting | Ready | Degraded (was ready, and a process is not any more) | Draining"""

    ready: bool
    """Every process is."""

    ratio: str
    """Workers in the roles prefill:decode, those that leave not counted."""

    pid: int
    containers: list[ContainerStatus]
    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    attainment: float | None = None
    in_flight: int | None = None
    mode: str = "Off"
    """spec.scaling.mode: who moves the ratio."""

    pools: str = ""
    """Workers whose home each pool is, prefill:decode, those that leave not counted."""

    target: str | None = None
    """What the ratio is to be: in mode Recommend, what the law would make it."""

    decision: DecisionStatus | None = None
    moves: int = 0
    """Changes of the ratio by the law since `up`."""

    flaps: int = 0
    """Of them, those that took the one before back within two minutes."""

    resizes: int = 0
    """Changes of the pools' sizes by the law since `up`."""


class DownRequest(msgspec.Struct, forbid_unknown_fields=True):
    now: bool = False
    """Kill instead of drain."""


class RatioRequest(msgspec.Struct, forbid_unknown_fields=True):
    ratio: str


class RatioResponse(msgspec.Struct):
    ratio: str
    switched: dict[str, str]
    """Worker -> new role."""


class Refusal(msgspec.Struct):
    error: str
