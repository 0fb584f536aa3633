"""httpGet probes with Kubernetes' meaning: a verdict changes after so many results in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from forebay_wire.urls import host_port


@dataclass(frozen=True, slots=True)
class Probe:
    path: str
    port: int
    initial_delay: float = 0.0
    period: float = 10.0
    timeout: float = 1.0
    success_threshold: int = 1
    failure_threshold: int = 3
    grace: float | None = None
    """Seconds from SIGTERM to SIGKILL when this probe is why; None: the pod's own."""


def parse_probe(spec: Mapping[str, Any], ports: Mapping[str | int, int]) -> Probe:
    """A probe of a container's spec; `ports` maps its port names and numbers to those in use here.

    Raises ValueError for a kind other than httpGet and for a port the container does not have.
    """
    get = spec.get("httpGet")
    if not isinstance(get, Mapping):
        raise ValueError("only httpGet probes are supported in local mode")
    port = get.get("port", "http")
    if port not in ports:
        raise ValueError(f"the probe's port {port!r} is none of the container's: {', '.join(map(str, ports))}")
    return Probe(
        path=str(get.get("path", "/")),
        port=ports[port],
        # As in Kubernetes, 0 means the default.
        initial_delay=float(spec.get("initialDelaySeconds") or 0),
        period=float(spec.get("periodSeconds") or 10),
        timeout=float(spec.get("timeoutSeconds") or 1),
        success_threshold=int(spec.get("successThreshold") or 1),
        failure_threshold=int(spec.get("failureThreshold") or 3),
        grace=spec.get("terminationGracePeriodSeconds"),
    )


class Verdict:
    """What the results so far say; None until a threshold is met for the first time."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._last: bool | None = None
        self._in_a_row = 0
        self.healthy: bool | None = None

    def add(self, ok: bool) -> bool | None:
        self._in_a_row = self._in_a_row + 1 if ok is self._last else 1
        self._last = ok
        needed = self._probe.success_threshold if ok else self._probe.failure_threshold
        if self._in_a_row >= needed:
            self.healthy = ok
        return self.healthy


@dataclass(frozen=True, slots=True)
class Result:
    ok: bool
    why: str
    headers: Mapping[str, str]


async def http_get(session: aiohttp.ClientSession, host: str, probe: Probe) -> Result:
    """200 to 399 within the probe's timeout is success."""
    try:
        async with session.get(
            f"http://{host_port(host, probe.port)}{probe.path}",
            timeout=aiohttp.ClientTimeout(total=probe.timeout),
            allow_redirects=False,
        ) as response:
            return Result(200 <= response.status < 400, f"status {response.status}", response.headers)
    except TimeoutError:
        return Result(False, f"no answer within {probe.timeout:g} s", {})
    except aiohttp.ClientError as error:
        return Result(False, str(error) or type(error).__name__, {})
