"""kopf's part: watch, and put the key of the model concerned into the queue. Nothing else is decided here."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, Final, Protocol, cast

import kopf

from forebay_operator.act.apply import ApplyCache, key_of
from forebay_operator.act.apply import Key as CacheKey
from forebay_operator.api import labels
from forebay_operator.kube import (
    BUDGETS,
    DEPLOYMENTS,
    MODELS,
    NETWORK_POLICIES,
    NODES,
    POD_MONITORS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Resource,
)
from forebay_operator.watching import WatchHealth

log = logging.getLogger(__name__)

Key = tuple[str, str]

ACTIVE: Final = (DEPLOYMENTS, PODS)
"""Each event of theirs is a reason to look."""

PASSIVE: Final = (SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, BUDGETS, NETWORK_POLICIES)
"""Looked at only when somebody changed what we applied. Secrets are not watched: one would have to be allowed to read
them all. They are asked for by name (act/actuator.py, observe/references.py)."""

NODE_DELAY_SECONDS: Final = 2.0
"""Nodes change in groups: after a cordon, or one that got ready or lost."""

NODE_FACTS_DELAY_SECONDS: Final = 10.0
"""After another change of labels or resources: nothing depends on it at once, and each is a look at every model."""


WATCH_RETRY_SECONDS: Final = (1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 30.0)
"""Between tries of a watch that is refused (403, 5xx) or not answered. The last goes on for ever."""


Login = Callable[..., kopf.ConnectionInfo | None]


def login(**options: Any) -> kopf.ConnectionInfo | None:
    """By the pod's service account, else by the kubeconfig: as the operator's own client does."""
    return kopf.login_with_service_account(**options) or kopf.login_with_kubeconfig(**options)


class Queue(Protocol):
    def add(self, key: Key, delay: float = 0.0) -> None: ...

    def forget(self, key: Key) -> None: ...


class Watches:
    def __init__(
        self,
        queue: Queue,
        cache: ApplyCache,
        health: WatchHealth,
        clock: Callable[[], float],
        on_nodes: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._health = health
        self._clock = clock
        self._on_nodes = on_nodes
        self._models: set[Key] = set()
        self._nodes: dict[str, tuple[str, str]] = {}

    def model(self, kind: str | None, obj: Mapping[str, Any]) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        self._health.seen(key, str(obj["metadata"].get("resourceVersion", "")))
        if kind == "DELETED":
            self._models.discard(key)
        else:
            self._models.add(key)
        # A deletion too: the reconcile finds nothing and forgets what it held.
        self._queue.add(key)

    def child(self, kind: str | None, obj: Mapping[str, Any], *, active: bool) -> None:
        meta = obj["metadata"]
        model = (meta.get("labels") or {}).get(labels.MODEL)
        if model is None:
            return
        gone = kind == "DELETED"
        key = (obj["apiVersion"], obj["kind"], meta.get("namespace", ""), meta["name"])
        changed = self._cache.drop(key) if gone else self._cache.seen(obj)
        if active or changed or gone:
            self._queue.add((meta["namespace"], model))

    def listed(self, objects: Collection[Mapping[str, Any]], cached: Collection[CacheKey]) -> None:
        """All children of a kind, as they are now, and what the cache held of it before they were asked for.

        A watch that has to begin anew (410) lists what there is, and never tells what went meanwhile: the cache would
        take it for applied for ever.
        """
        held = {key_of(obj) for obj in objects}
        for obj in objects:
            self.child(None, obj, active=False)
        lost = [key for key in cached if key not in held and self._cache.drop(key)]
        for namespace in {key[2] for key in lost}:
            for model in self._models:
                if model[0] == namespace:
                    self._queue.add(model)

    def node(self, kind: str | None, obj: Mapping[str, Any]) -> None:
        """Its heartbeats are no news; its labels, resources, readiness and cordon are."""
        name = obj["metadata"]["name"]
        status, spec = obj.get("status") or {}, obj.get("spec") or {}
        ready = [c.get("status") for c in status.get("conditions") or [] if c.get("type") == "Ready"]
        held = self._nodes.get(name)
        mark = (
            _mark(spec.get("unschedulable"), ready),
            _mark(obj["metadata"].get("labels"), status.get("allocatable")),
        )
        if kind == "DELETED":
            self._nodes.pop(name, None)
        elif held == mark:
            return
        else:
            self._nodes[name] = mark
        self._on_nodes()
        facts_alone = kind != "DELETED" and held is not None and held[0] == mark[0]
        for key in self._models:
            self._queue.add(key, NODE_FACTS_DELAY_SECONDS if facts_alone else NODE_DELAY_SECONDS)


def _mark(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def registry(
    watches: Watches, *, nodes: bool, pod_monitors: bool = False, authenticate: Login = login
) -> kopf.OperatorRegistry:
    """Handlers of raw events only: kopf then writes nothing to any object, neither finalizers nor annotations."""
    made = kopf.OperatorRegistry()
    kopf.on.login(id="login", registry=made)(authenticate)
    _watch(made, MODELS, lambda kind, obj: watches.model(kind, obj))
    for resource in ACTIVE:
        _watch(made, resource, lambda kind, obj: watches.child(kind, obj, active=True))
    for resource in (*PASSIVE, *((POD_MONITORS,) if pod_monitors else ())):
        _watch(made, resource, lambda kind, obj: watches.child(kind, obj, active=False))
    if nodes:
        _watch(made, NODES, lambda kind, obj: watches.node(kind, obj))
    return made


def _watch(
    made: kopf.OperatorRegistry, resource: Resource, handle: Callable[[str | None, dict[str, Any]], None]
) -> None:
    version = resource.api_version.rpartition("/")[2]

    # The id is given, for kopf would make one of the qualified name of this inner function.
    @kopf.on.event(resource.group, version, resource.plural, id=f"watch-{resource.plural}", registry=made)
    async def seen(event: kopf.RawEvent, **_: Any) -> None:
        obj = dict(cast(Mapping[str, Any], event["object"]))
        obj.setdefault("apiVersion", resource.api_version)
        obj.setdefault("kind", resource.kind)
        handle(cast("str | None", event["type"]), obj)


class _Backoffs(Iterable[float]):
    def __iter__(self) -> Iterator[float]:
        return chain(WATCH_RETRY_SECONDS, repeat(WATCH_RETRY_SECONDS[-1]))


def settings(*, request_timeout: float = 30.0) -> kopf.OperatorSettings:
    """What must not be left to kopf's defaults, and why."""
    made = kopf.OperatorSettings()
    # Only our children are sent to us. A string key with a slash matches nothing, and says nothing.
    for resource in (*ACTIVE, *PASSIVE, POD_MONITORS):
        version = resource.api_version.rpartition("/")[2]
        made.watching.label_selectors[resource.group, version, resource.plural] = labels.MODEL
    made.watching.chunk_size = 500
    made.watching.reconnect_backoff = 1.0
    # The default of 300 s would hold a watch up for as long.
    made.networking.request_timeout = request_timeout
    made.networking.connect_timeout = 5.0
    # After its own eight (54 s) kopf ends, with all its watches. A namespace of several may be gone for good, and
    # its rights with it; and an API server that is out of order for minutes is no reason to begin anew.
    made.networking.error_backoffs = _Backoffs()
    # We write our own Events and lead by our own Lease.
    made.posting.enabled = False
    made.peering.standalone = True
    # The set of kinds is fixed, and looking for new ones takes rights on all CRDs and namespaces.
    made.scanning.disabled = True
    made.persistence.finalizer = f"{labels.GROUP}/finalizer"
    made.queueing.idle_timeout = 2.0
    return made
