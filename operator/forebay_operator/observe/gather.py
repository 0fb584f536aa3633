"""Everything that one reconcile looks at, read from the API server and the routers: one frozen view.

Reads are live, not from a watch's cache: whatever a reconcile decides, it decides on what the API server holds now, and
a lagging watch can only delay it. The watches (handlers.py) say when to look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from forebay_operator.api import labels
from forebay_operator.kube import DEPLOYMENTS, NODES, PODS, REPLICA_SETS, Forbidden, Kube, Object
from forebay_operator.observe import objects
from forebay_operator.observe.load import Loads, Workers
from forebay_operator.observe.problems import performance_model_problem, problems, transport_problems
from forebay_operator.observe.references import missing, references
from forebay_operator.observe.types import NodeView, Observation

log = logging.getLogger(__name__)

NODES_SECONDS: Final = 5.0
"""Nodes are read at most this often, for all models together."""

NODES_LEAST_SECONDS: Final = 1.0
"""And so often when one has changed: a thousand of them are a long list, and some node changes all the time. It is
shorter than models wait for such a change (handlers.NODE_DELAY_SECONDS)."""


@dataclass(frozen=True, slots=True)
class Gathered:
    observation: Observation
    loads: Loads
    deployments: Mapping[str, Object]
    """Ours, as read."""

    routers: tuple[str, ...] = ()
    """Addresses of the ready ones."""


@dataclass(slots=True)
class Nodes:
    """All nodes, read seldom. None where they may not be read: in namespaced mode."""

    kube: Kube
    clock: Callable[[], float]
    readable: bool = True
    _held: tuple[NodeView, ...] | None = None
    _read_at: float | None = None
    _stale: bool = False
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def views(self) -> tuple[NodeView, ...] | None:
        async with self._lock:
            least = NODES_LEAST_SECONDS if self._stale else NODES_SECONDS
            if not self.readable or (self._read_at is not None and self.clock() - self._read_at < least):
                return self._held
            # Before they are asked for: what changes meanwhile is another reason to ask.
            self._stale = False
            try:
                self._held = tuple(objects.node_view(node) for node in await self.kube.list(NODES, None))
            except Forbidden as error:
                log.info("nodes are not readable, so GPU pinning is not checked: %s", error)
                self._held, self.readable = None, False
            except BaseException:
                self._stale = True
                raise
            self._read_at = self.clock()
            return self._held

    def changed(self) -> None:
        self._stale = True


class Gatherer:
    def __init__(self, kube: Kube, workers: Workers, nodes: Nodes, wall: Callable[[], float] = time.time) -> None:
        """`wall`: Unix seconds, as the API server's times are."""
        self._kube = kube
        self._workers = workers
        self._nodes = nodes
        self._wall = wall

    async def gather(self, model: Object) -> Gathered:
        """Raises ApiError: on half a view nothing is decided."""
        meta: dict[str, Any] = model["metadata"]
        namespace, selector = meta["namespace"], f"{labels.MODEL}={meta['name']}"
        deployments, replica_sets, pods, nodes, absent = await asyncio.gather(
            self._kube.list(DEPLOYMENTS, namespace, selector=selector),
            self._kube.list(REPLICA_SETS, namespace, selector=selector),
            self._kube.list(PODS, namespace, selector=selector),
            self._nodes.views(),
            missing(self._kube, namespace, references(model.get("spec") or {})),
        )
        ours = objects.controlled_by(deployments, [meta["uid"]])
        sets = objects.controlled_by(replica_sets, [obj["metadata"]["uid"] for obj in ours])
        controlled = objects.controlled_by(pods, [obj["metadata"]["uid"] for obj in sets])
        # Of one that has ended a ReplicaSet has made another: as a victim it would cost a worker that nobody drained.
        mine = [pod for pod in controlled if not objects.has_ended(pod)]
        workers = [(pod, pool) for pod in mine if (pool := objects.pool_of(pod)) is not None]
        routers = [pod for pod in mine if objects.pool_of(pod) is None]
        ready = [pod for pod in routers if objects.is_ready(pod) and not pod["metadata"].get("deletionTimestamp")]
        addresses = sorted(str(pod["status"]["podIP"]) for pod in ready if pod["status"].get("podIP"))
        loads = await self._workers.loads(addresses) if addresses else Loads()
        views = []
        for pod, pool in workers:
            seen = loads.workers.get(pod["metadata"]["name"])
            views.append(objects.pod_view(pod, pool, seen.report, seen.age) if seen else objects.pod_view(pod, pool))
        observation = Observation(
            generation=meta.get("generation", 0),
            pods=tuple(sorted(views, key=lambda view: view.name)),
            deployments=tuple(sorted((objects.deployment_view(d) for d in ours), key=lambda view: view.name)),
            nodes=nodes,
            router_ready=len(ready),
            latency=loads.latency,
            problems=(
                *absent,
                *problems(ours, sets, mine, self._wall()),
                *transport_problems(model.get("spec") or {}, views),
                *performance_model_problem(model),
            ),
        )
        return Gathered(observation, loads, {obj["metadata"]["name"]: dict(obj) for obj in ours}, tuple(addresses))
