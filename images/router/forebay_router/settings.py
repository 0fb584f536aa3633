"""The router's settings: one frozen object made from the command line (main.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forebay_router.gear import Convertible
from forebay_wire.connections import MAX_BODY_BYTES

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Times are seconds, sizes bytes."""

    name: str
    """Sent to workers as the router's id; the worker counts requests by it."""

    host: str
    port: int
    workers_file: Path | None
    """None: the workers are the pods of `kubernetes_model`."""

    kubernetes_namespace: str = "default"
    kubernetes_model: str | None = None
    kubernetes_api: str | None = None
    """URL of the API server. None: the one of the cluster that this pod runs in."""

    kubernetes_credentials: Path | None = None
    """Folder with `token` and `ca.crt`. None: the pod's service account."""
    token: bytes | None = None
    """The per-model secret: bearer of every call to a worker. None: workers' internal endpoints will refuse us."""

    served_name: str | None = None
    """None: whatever models the workers report."""

    both_phases: bool = True
    """R5: with one pool gone, the other serves both phases; False refuses with 503."""

    start_grace: float = 5.0
    """Seconds from the first ready worker of all in which requests wait for the first one of the other role, before R5
    applies. Workers that start together are seconds apart."""

    api_keys: tuple[bytes, ...] = ()
    """Clients' keys; empty: no key is asked for."""

    ttft_objective: float = 1.0
    tpot_objective: float = 0.04
    """Infinity: there is no such objective."""

    convertible: Convertible = "never"
    """When decode workers with TPOT head-room compute prompts: gear.CONVERTIBLE."""

    refusal_factor: float = 0.0
    """R6: refuse what is predicted to take over so many times the TTFT objective. 0: never."""

    prefix_routing: bool = True
    """Prefer workers that have a prompt's beginning cached. False: by load alone."""

    request_timeout: float = 600.0
    connect_timeout: float = 1.0
    prefill_timeout: float = 300.0
    """Of one prefill leg, and of the wait for the first byte where one worker does both phases: queueing is in it."""

    stall_timeout: float = 20.0
    """A decode stream without a byte for this long counts as dead: a wedged worker never errors."""

    suspect_after: float = 2.0
    """Silence of a worker's load stream (pushed every 0.2 s) after which it is suspected."""

    suspect_stall: float = 3.0
    """Replaces the timeouts above while the worker is suspected."""

    reserve_timeout: float = 2.0
    reserve_ttl: float = 60.0
    write_timeout: float = 30.0
    """A client that reads nothing for this long while our buffer is full is dropped."""

    header_timeout: float = 30.0
    body_idle_timeout: float = 30.0
    body_timeout: float = 120.0
    keepalive_timeout: float = 75.0
    drain_timeout: float = 600.0
    role_grace: float = 20.0
    max_body: int = MAX_BODY_BYTES
    max_bodies: int = 512 * MIB
    """Of all request bodies held at a time. Connections times `max_body` would be 32 GB."""

    max_reply: int = 64 * MIB
    """Of a worker's whole (not streamed) answer."""

    max_in_flight: int = 2048
    max_connections: int = 4096
    log_level: str = "info"

    @property
    def handoff_timeout(self) -> float:
        """Wait for the first byte of a decode leg. Longer than a stall: the decode worker's own pull timeout (20 s by
        default) and the recomputation after it (R2) lie inside, and are its business."""
        return 2 * self.stall_timeout + 5.0
