"""Discovery in Kubernetes: the model's worker pods, by their labels, from one list and one watch.

When the API server is away the last view stays: pods that went meanwhile show themselves by their dead load streams.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from forebay_router.discovery import MAX_WORKERS, ROLES, Roles, View
from forebay_wire import labels
from forebay_wire.discovery import WorkerEntry
from forebay_wire.urls import host_port

log = logging.getLogger(__name__)

CREDENTIALS: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_PORT: Final = 8000
PAGE: Final = 500
MAX_LINE: Final = 4 * 1024 * 1024
"""Of one pod as JSON: etcd takes 1.5 MiB."""

REQUEST_SECONDS: Final = 15.0
WATCH_SECONDS: Final = 300
SILENCE_SECONDS: Final = 75.0
"""Bookmarks come every minute: a watch silent for longer is dead, whatever its connection looks like."""

BACKOFF_SECONDS: Final = (0.5, 30.0)
TICK_SECONDS: Final = 1.0
"""The grace period of a worker without a role ends by the clock, not by an event."""


class ApiFailed(Exception):
    """The API server could not be asked, or refused."""


class Expired(Exception):
    """The watch's starting point is too old: list again."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    url: str
    credentials: Path = CREDENTIALS
    """Folder with `token` and `ca.crt`; without them (tests) none are sent."""

    @staticmethod
    def in_cluster(credentials: Path = CREDENTIALS) -> ApiServer:
        """Raises ApiFailed outside of a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ApiFailed(
                "KUBERNETES_SERVICE_HOST is not set: this is no pod; give --workers-file instead of --kubernetes-model"
            )
        return ApiServer(f"https://{host_port(host, port)}", credentials)

    def headers(self) -> dict[str, str]:
        """Read anew each time: the kubelet replaces the token before it expires."""
        try:
            token = (self.credentials / "token").read_text().strip()
        except OSError:
            return {}
        return {"Authorization": f"Bearer {token}"}

    def tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https"):
            return None
        file = self.credentials / "ca.crt"
        return ssl.create_default_context(cafile=str(file) if file.exists() else None)


class PodTable:
    """Pods by name, and the workers they are. Pure."""

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, WorkerEntry]] = {}

    def replace(self, pods: list[Mapping[str, Any]]) -> None:
        """The whole list."""
        held, self._pods = self._pods, {}
        for pod in pods:
            self._put(pod, held)

    def event(self, kind: str, pod: Mapping[str, Any]) -> None:
        if kind == "DELETED":
            held = self._pods.get(pod["metadata"]["name"])
            # A StatefulSet-like pod of the same name may have come before the news of the old one's end.
            if held is not None and held[0] == pod["metadata"].get("uid"):
                del self._pods[pod["metadata"]["name"]]
        else:
            self._put(pod, self._pods)

    def entries(self) -> list[WorkerEntry]:
        return [entry for _, (_, entry) in sorted(self._pods.items())][:MAX_WORKERS]

    def _put(self, pod: Mapping[str, Any], held: Mapping[str, tuple[str, WorkerEntry]]) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"].get("uid", "")
        known = name in held and held[name][0] == uid
        entry = worker_of(pod, known=known)
        if entry is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = (uid, entry)


def worker_of(pod: Mapping[str, Any], *, known: bool) -> WorkerEntry | None:
    """The worker in a pod, or None while there is none to send to.

    A pod enters when it is ready. Once in, it stays until it ends, ready or not: how the worker is, its load stream
    tells faster and better, and what runs on a draining one must not lose it. A terminating pod is draining.
    """
    meta, status = pod["metadata"], pod.get("status") or {}
    marks = meta.get("labels") or {}
    address, phase = status.get("podIP"), status.get("phase")
    pool, role = marks.get(labels.POOL), marks.get(labels.ROLE)
    if not address or phase in ("Succeeded", "Failed") or pool not in ROLES:
        return None
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or [])
    if not ready and not known:
        return None
    draining = labels.DRAINING in marks or meta.get("deletionTimestamp") is not None
    return WorkerEntry(meta["name"], address, _port(pod), pool, role if role in ROLES else None, draining)


def _port(pod: Mapping[str, Any]) -> int:
    for container in (pod.get("spec") or {}).get("containers") or []:
        for port in container.get("ports") or []:
            if port.get("name") == "http":
                return int(port["containerPort"])
    return DEFAULT_PORT


class PodDiscovery:
    """`Discovery` (discovery.py) by the pods of one model in one namespace."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        model: str,
        grace: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        backoff: tuple[float, float] = BACKOFF_SECONDS,
    ) -> None:
        self._server = server
        self._url = f"{server.url}/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        self._selector = f"{labels.MODEL}={model},{labels.POOL}"
        self._roles = Roles(grace)
        self._clock = clock
        self._rng = rng or random.Random()
        self._backoff = backoff
        self._table = PodTable()
        self._listed = False

    async def run(self, on_view: Callable[[View], None]) -> None:
        shown: View | None = None

        def show() -> None:
            nonlocal shown
            # Before the first list nothing is known, which is not the same as knowing that there is nobody.
            view = self._roles.resolve(self._table.entries(), self._clock())
            if self._listed and view != shown:
                shown = view
                on_view(view)

        async def tick() -> None:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                show()

        ticking = asyncio.create_task(tick())
        try:
            await self._follow(show)
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def _follow(self, show: Callable[[], None]) -> None:
        failures = 0
        connector = aiohttp.TCPConnector(ssl=self._server.tls() or False)
        async with aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=MAX_LINE) as session:
            while True:
                try:
                    version = await self._list(session)
                    show()
                    if failures:
                        log.info("the API server answers again")
                    failures = 0
                    while True:
                        async with aclosing(self._watch(session, version)) as events:
                            async for kind, obj in events:
                                version = obj["metadata"]["resourceVersion"]
                                if kind != "BOOKMARK":
                                    self._table.event(kind, obj)
                                    show()
                        # A server that ends each watch at once must not be asked in a busy loop.
                        await asyncio.sleep(self._backoff[0] * self._rng.uniform(0.5, 1.0))
                except Expired:
                    await asyncio.sleep(self._backoff[0] * self._rng.uniform(0.5, 1.0))
                except (
                    ApiFailed,
                    aiohttp.ClientError,
                    OSError,
                    TimeoutError,
                    ValueError,
                    KeyError,
                    TypeError,
                ) as error:
                    failures += 1
                    if failures == 1:
                        log.warning("pods can't be watched, the last view stays: %s", error or type(error).__name__)
                    first, limit = self._backoff
                    await asyncio.sleep(min(limit, first * 2.0 ** min(failures - 1, 16)) * self._rng.uniform(0.5, 1.0))

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Take all pods in; the version to watch from."""
        pods: list[Mapping[str, Any]] = []
        query = {"labelSelector": self._selector, "limit": str(PAGE)}
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        while True:
            async with session.get(
                self._url, params=query, headers=self._server.headers(), timeout=timeout
            ) as response:
                if response.status == 410 and "continue" in query:
                    raise Expired
                if response.status != 200:
                    raise ApiFailed(f"list of pods: status {response.status}: {(await response.text())[:300]}")
                page = await response.json(content_type=None)
            pods += page.get("items") or []
            token = page["metadata"].get("continue")
            if not token or len(pods) >= MAX_WORKERS:
                self._table.replace(pods)
                self._listed = True
                version: str = page["metadata"]["resourceVersion"]
                return version
            query["continue"] = token

    async def _watch(
        self, session: aiohttp.ClientSession, version: str
    ) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Events until the server ends the watch, as it does regularly. Raises Expired, ApiFailed and aiohttp's."""
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENCE_SECONDS)
        async with session.get(self._url, params=query, headers=self._server.headers(), timeout=timeout) as response:
            if response.status == 410:
                raise Expired
            if response.status != 200:
                raise ApiFailed(f"watch of pods: status {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:
                        raise Expired
                    raise ApiFailed(f"watch of pods: {event['object'].get('message')}")
                yield event["type"], event["object"]
