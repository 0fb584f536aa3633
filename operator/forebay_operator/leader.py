"""Leader election by a Lease: of several operators one writes.

The rules are client-go's (leaderelection.go). No two machines' clocks are compared: a candidate takes over when it has
seen the record unchanged for a whole lease duration of its own monotonic clock. The holder steps down when it could not
renew for `renew_deadline`, which is shorter, counted from before the last good renewal was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from forebay_operator.kube import LEASES, ApiError, Conflict, Kube, NotFound, Object

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds; client-go's defaults."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.renew_deadline < self.duration:
            raise ValueError(f"lease times must rise: retry {self.retry} < renew deadline {self.renew_deadline} "
                             f"< duration {self.duration}")  # fmt: skip


@dataclass(slots=True)
class Watched:
    """What a candidate has seen of the Lease, and since when by its own clock. Pure."""

    identity: str
    duration: float
    _record: tuple[Any, ...] | None = field(default=None)
    _since: float = 0.0

    def may_take(self, lease: Object | None, now: float) -> bool:
        """Whether to write the Lease now: it is free, ours, or was not renewed for its duration."""
        spec = {} if lease is None else lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        record = (holder, spec.get("renewTime"), spec.get("acquireTime"), spec.get("leaseTransitions"))
        if record != self._record:
            self._record, self._since = record, now
        if holder in ("", self.identity):
            return True
        # The holder's own figure counts where it is longer: it may have been started with other settings.
        duration = max(self.duration, float(spec.get("leaseDurationSeconds") or 0))
        return now - self._since >= duration


class LeaderElector:
    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        times: LeaseTimes | None = None,
    ) -> None:
        """`clock` is monotonic and the one that the event loop sleeps by; `wall` only fills the Lease's times."""
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._wall = wall
        self._times = times or LeaseTimes()
        self._watched = Watched(identity, self._times.duration)
        self._renewed: float | None = None
        self._acquired = asyncio.Event()

    def is_leader(self) -> bool:
        """True while no other operator can have taken over: also right after this process was stopped for a while."""
        return self._renewed is not None and self._clock() - self._renewed < self._times.renew_deadline

    async def acquired(self) -> None:
        """Returns once this process leads."""
        await self._acquired.wait()

    async def run(self) -> None:
        """Try until leading, then renew. Returns when the Lease is lost: the process must end then, for whatever it has
        under way was begun as leader. Releases the Lease when cancelled."""
        while not await self._try():  # noqa: ASYNC110 (nobody tells us)
            await asyncio.sleep(self._times.retry)
        log.info("leading as %s", self._identity)
        self._acquired.set()
        try:
            while self.is_leader():
                await asyncio.sleep(self._times.retry)
                await self._try()
        except asyncio.CancelledError:
            await self._release()
            raise
        log.error("the Lease %s/%s was lost: not renewed for %.0f s, or taken", self._namespace, self._name,
                  self._times.renew_deadline)  # fmt: skip

    async def _try(self) -> bool:
        """Write the Lease if that is allowed; whether it holds. Never raises ApiError."""
        try:
            # Counted from before the request: the server stamps it later, which only makes us step down earlier.
            sent = self._clock()
            async with asyncio.timeout(self._times.renew_deadline):
                if await self._write(sent):
                    self._renewed = sent
                    return True
        except Conflict:
            log.info("another operator wrote the Lease first")
        except (ApiError, TimeoutError) as error:
            log.warning("cannot take or renew the Lease: %s", error)
        return False

    async def _write(self, now: float) -> bool:
        lease: Object | None
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
        except NotFound:
            lease = None
        if not self._watched.may_take(lease, now):
            self._renewed = None
            return False
        stamp = _micro(self._wall())
        held = {} if lease is None else lease.get("spec") or {}
        ours = held.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._times.duration)),
            "acquireTime": held.get("acquireTime") if ours else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(held.get("leaseTransitions") or 0) + (not ours),
        }
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            await self._kube.create(LEASES, {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata,
                                             "spec": spec})  # fmt: skip
        else:
            # It carries the resourceVersion that was read: of two writers one gets a Conflict.
            await self._kube.replace(LEASES, {**lease, "spec": spec})
        return True

    async def _release(self) -> None:
        """So that the next operator need not wait the duration out. Best effort."""
        if not self.is_leader():
            return
        self._renewed = None
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(self._times.retry):
                lease = await self._kube.get(LEASES, self._namespace, self._name)
                spec = lease.get("spec") or {}
                if spec.get("holderIdentity") == self._identity:
                    freed = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro(self._wall())}
                    await self._kube.replace(LEASES, {**lease, "spec": freed})


def _micro(time: datetime) -> str:
    """As metav1.MicroTime is written."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
