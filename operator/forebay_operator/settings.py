"""The operator's settings: one frozen object made from the command line (main.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay_operator.build.surroundings import Surroundings
from forebay_operator.leader import LeaseTimes


@dataclass(frozen=True, slots=True)
class Settings:
    """Times are seconds."""

    namespace: str
    """The operator's own: its Lease is there."""

    identity: str
    """Unique per process: two pods of one name must not share a Lease."""

    namespaces: tuple[str, ...] = ()
    """Where models are served. Empty: everywhere, which takes cluster-wide rights."""

    lease_name: str = "forebay-operator"
    lease: LeaseTimes = field(default_factory=LeaseTimes)
    host: str = "0.0.0.0"  # noqa: S104 (probes and Prometheus come from outside the pod)
    port: int = 8080
    """Of /healthz, /readyz and /metrics."""

    workers: int = 8
    """Models reconciled at once."""

    reconcile_timeout: float = 60.0
    resync: float = 600.0
    """Each model is looked at this often even when no watch reports anything."""

    kinds_every: float = 60.0
    """Optional kinds are looked for this often."""

    watch_stale_after: float = 90.0
    """A write that the watch does not report for so long: the watch is dead."""

    log_level: str = "info"
    surroundings: Surroundings = field(default_factory=Surroundings)
