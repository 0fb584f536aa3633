"""Which source a model's spec asks for, made with what it needs."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import aiohttp

from forebay_operator.api.scaling import MetricsAuth
from forebay_operator.api.v1alpha1 import DisaggregatedModelSpec
from forebay_operator.kube import SECRETS, ApiError, Kube
from forebay_operator.observe.endpoints import EndpointsSource
from forebay_operator.observe.fits import Capacity
from forebay_operator.observe.router_report import Totals
from forebay_operator.observe.traffic_source import TrafficSource

if TYPE_CHECKING:
    from forebay_operator.observe.prometheus import Credentials

SECRET_SECONDS: Final = 60.0
CA_KEY: Final = "ca.crt"
"""Of the Secret that holds the token: certificates to trust instead of the usual ones."""


class Sources:
    """Of all models. One HTTP client serves them."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def make(
        self, key: tuple[str, str], spec: DisaggregatedModelSpec, totals: Totals | None, capacity: Capacity | None
    ) -> TrafficSource:
        """`totals`, `capacity`: of the source before, which the new one goes on from."""
        metrics = spec.scaling.metrics
        if metrics.source == "Prometheus" and metrics.url is not None:
            # Only here: most operators never ask a Prometheus.
            from forebay_operator.observe.prometheus import Asked, PrometheusSource

            headers = {header.name: header.value for header in metrics.headers or []}
            asked = Asked(metrics.url, *key, block_size=spec.engine.kv_cache.block_size, headers=headers)
            secret = _Secret(self._kube, key[0], metrics.auth)
            return PrometheusSource(asked, self._clock, credentials=secret.read, base=totals, capacity=capacity)
        if self._session is None:
            # Each model asks a bounded number at once. One bound for all would let the silent ones keep others waiting.
            self._session = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))
        return EndpointsSource(self._session, self._clock, base=totals, capacity=capacity)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Secret:
    """A token and certificates, read again each minute."""

    def __init__(self, kube: Kube, namespace: str, auth: MetricsAuth | None) -> None:
        self._kube = kube
        self._namespace = namespace
        self._auth = auth
        self._held: Credentials | None = None
        self._read_at = 0.0

    async def read(self) -> Credentials:
        """Raises ValueError, which never holds a value of the Secret."""
        from forebay_operator.observe.prometheus import Credentials

        if self._auth is None:
            return Credentials()
        now = asyncio.get_running_loop().time()
        if self._held is not None and now - self._read_at < SECRET_SECONDS:
            return self._held
        ref = self._auth.bearer_token_secret_ref
        where = f"Secret {self._namespace}/{ref.name}"
        try:
            data = (await self._kube.get(SECRETS, self._namespace, ref.name)).get("data") or {}
            token = base64.b64decode(data[ref.key], validate=True).decode("ascii").strip()
            ca = base64.b64decode(data.get(CA_KEY, ""), validate=True)
        except ApiError as error:
            raise ValueError(f"{where} can't be read: {error}") from None
        except KeyError:
            raise ValueError(f"{where} has no key {ref.key}; put the bearer token there") from None
        except (binascii.Error, UnicodeDecodeError):
            raise ValueError(f"{where}: {ref.key} or {CA_KEY} is not what it should be") from None
        self._held, self._read_at = Credentials(token, ca), now
        return self._held
