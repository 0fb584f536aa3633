"""A small API server: objects in memory, resourceVersions, generations, server-side apply, watches, faults at will.

It is no authority: server-side apply treats every list as atomic but ownerReferences, and schemas are not checked. What
it is for is faults: any request can be refused, answered late, or lost after it was carried out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from forebay_operator import kube
from support.direct_client import DirectClient
from support.kube_calls import Call, Refused
from support.objects import Object, Path, at, clone, leaf_paths, matches, merge, remove, selector

Owned = dict[tuple[str, str, str], dict[str, set[Path]]]
"""Field paths by object and manager."""


RESOURCES = (
    kube.MODELS,
    *kube.CHILDREN,
    kube.REPLICA_SETS,
    kube.PODS,
    kube.NODES,
    kube.LEASES,
    kube.EVENTS,
    kube.CONFIG_MAPS,
    kube.Resource("v1", "Namespace", "namespaces", namespaced=False),
    kube.Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False),
)


@dataclass
class FakeApi:
    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    """By plural, namespace and name."""

    calls: list[Call] = field(default_factory=list)
    before: Callable[[Call], None] | None = None
    """Raise Refused to refuse a call."""

    after: Callable[[Call], None] | None = None
    """Raise Refused to lose the answer of a call that was carried out."""

    on_write: Callable[[], None] | None = None
    """Controllers run here."""

    missing: set[str] = field(default_factory=set)
    """Plurals that this server does not know."""

    url: str = ""

    def __post_init__(self) -> None:
        self._version = itertools.count(100)
        self._uid = itertools.count(1)
        self._owned: dict[tuple[str, str, str], dict[str, set[Path]]] = {}
        self._watchers: list[tuple[str, str, dict[str, str], asyncio.Queue[tuple[str, Object]]]] = []
        self._resources = {r.plural: r for r in RESOURCES}
        self.last_version = 100

    # What tests do to it directly

    def put(self, obj: Object) -> Object:
        """Create or replace as some other client would."""
        resource = next(r for r in RESOURCES if (r.api_version, r.kind) == (obj["apiVersion"], obj["kind"]))
        return self._store(resource, clone(obj), status=True)

    def find(self, plural: str, name: str, namespace: str = "llm") -> Object | None:
        return self.objects.get((plural, "" if not self._resources[plural].namespaced else namespace, name))

    def all(self, plural: str) -> list[Object]:
        return [obj for (kind, _, _), obj in sorted(self.objects.items()) if kind == plural]

    def remove(self, plural: str, name: str, namespace: str = "llm") -> None:
        key = (plural, namespace if self._resources[plural].namespaced else "", name)
        obj = self.objects.pop(key)
        self._owned.pop(key, None)
        self._announce("DELETED", self._resources[plural], obj)
        self._collect(obj["metadata"]["uid"])

    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.write]

    def snapshot(self) -> tuple[Any, ...]:
        return ({key: clone(obj) for key, obj in self.objects.items()}, self._copied(self._owned))

    def restore(self, held: tuple[Any, ...]) -> None:
        """All objects as they were; versions go on."""
        objects, owned = held
        self.objects, self._owned = {key: clone(obj) for key, obj in objects.items()}, self._copied(owned)

    @staticmethod
    def _copied(
        owned: dict[tuple[str, str, str], dict[str, set[Path]]],
    ) -> dict[tuple[str, str, str], dict[str, set[Path]]]:
        return {key: {who: set(paths) for who, paths in fields.items()} for key, fields in owned.items()}

    def close_watches(self) -> None:
        for *_, queue in self._watchers:
            queue.put_nowait(("END", {}))

    # Storage

    def _store(self, resource: kube.Resource, obj: Object, *, status: bool) -> Object:
        meta = obj["metadata"]
        key = (resource.plural, meta.get("namespace", "") if resource.namespaced else "", meta["name"])
        held = self.objects.get(key)
        meta.setdefault("uid", held["metadata"]["uid"] if held else f"uid-{next(self._uid)}")
        meta["creationTimestamp"] = (
            held["metadata"]["creationTimestamp"] if held else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        )
        generation = held["metadata"].get("generation", 1) if held else 1
        changed = held is not None and held.get("spec") != obj.get("spec")
        meta["generation"] = generation + 1 if changed else generation
        if held is not None:
            plain = {k: v for k, v in meta.items() if k != "resourceVersion"}
            if {**obj, "metadata": plain} == {
                **held,
                "metadata": {k: v for k, v in held["metadata"].items() if k != "resourceVersion"},
            }:
                return held
        self.last_version = next(self._version)
        meta["resourceVersion"] = str(self.last_version)
        self.objects[key] = obj
        self._announce("MODIFIED" if held else "ADDED", resource, obj)
        return obj

    def _announce(self, kind: str, resource: kube.Resource, obj: Object) -> None:
        for plural, namespace, labels, queue in self._watchers:
            meta = obj["metadata"]
            if plural == resource.plural and namespace in ("", meta.get("namespace", "")) and matches(obj, labels):
                queue.put_nowait((kind, clone(obj)))

    def _collect(self, uid: str) -> None:
        """Dependants go with their owner, at once."""
        for plural, namespace, name in list(self.objects):
            obj = self.objects.get((plural, namespace, name))
            if obj and any(r.get("uid") == uid for r in obj["metadata"].get("ownerReferences") or []):
                self.remove(plural, name, namespace)

    # Requests

    def handle(self, call: Call, resource: kube.Resource, content_type: str) -> tuple[int, Object]:
        key = (call.plural, call.namespace, call.name)
        held = self.objects.get(key)
        if call.verb == "list":
            labels = selector(call.query.get("labelSelector", ""))
            items = [
                clone(obj)
                for (plural, namespace, _), obj in sorted(self.objects.items())
                if plural == call.plural and call.namespace in ("", namespace) and matches(obj, labels)
            ]
            meta = {"resourceVersion": str(self.last_version)}
            return 200, {
                "apiVersion": resource.api_version,
                "kind": f"{resource.kind}List",
                "metadata": meta,
                "items": items,
            }
        if call.verb == "create":
            obj = clone(call.body)
            name = obj["metadata"]["name"]
            if (call.plural, call.namespace, name) in self.objects:
                raise Refused(409, "AlreadyExists", f"{call.plural} {name!r} already exists")
            obj["metadata"]["namespace"] = call.namespace
            return 201, clone(self._store(resource, obj, status=True))
        if call.verb == "patch" and "apply" in content_type:
            return self._apply(call, resource, key, held)
        if held is None:
            raise Refused(404, "NotFound", f"{call.plural} {call.name!r} not found")
        if call.verb == "get":
            return 200, clone(held)
        if call.verb == "delete":
            conditions = (call.body or {}).get("preconditions") or {}
            meta = held["metadata"]
            if conditions.get("uid", meta["uid"]) != meta["uid"] or (
                conditions.get("resourceVersion", meta["resourceVersion"]) != meta["resourceVersion"]
            ):
                raise Refused(409, "Conflict", "precondition failed")
            self.remove(call.plural, call.name, call.namespace)
            return 200, {"kind": "Status", "status": "Success"}
        if call.verb == "update":
            obj = clone(call.body)
            self._check_version(obj, held)
            obj["metadata"]["uid"] = held["metadata"]["uid"]
            return 200, clone(self._store(resource, obj, status=True))
        obj = clone(held)
        if isinstance(call.body, list):
            raise Refused(415, "UnsupportedMediaType", "JSON patch")
        self._check_version(call.body, held)
        merge(obj, {k: v for k, v in call.body.items() if call.subresource != "status" or k in ("status", "metadata")})
        if call.query.get("dryRun"):
            return 200, obj
        return 200, clone(self._store(resource, obj, status=True))

    def _check_version(self, body: Object, held: Object) -> None:
        asked = (body.get("metadata") or {}).get("resourceVersion")
        if asked and asked != held["metadata"]["resourceVersion"]:
            raise Refused(
                409, "Conflict", "the object has been modified; please apply your changes to the latest version"
            )
        uid = (body.get("metadata") or {}).get("uid")
        if uid and uid != held["metadata"]["uid"]:
            raise Refused(409, "Conflict", f"uid mismatch: {uid}")

    def _apply(
        self, call: Call, resource: kube.Resource, key: tuple[str, str, str], held: Object | None
    ) -> tuple[int, Object]:
        manager, force = call.query["fieldManager"] + call.subresource, call.query.get("force") == "true"
        body = clone(call.body)
        asked = body["metadata"]
        if held is None:
            if call.subresource:
                raise Refused(404, "NotFound", f"{call.plural} {call.name!r} not found")
            if asked.get("uid") or asked.get("resourceVersion"):
                raise Refused(409, "Conflict", "the object does not exist")
        else:
            self._check_version(body, held)
        for gone in ("uid", "resourceVersion"):
            asked.pop(gone, None)
        if call.subresource:
            body = {"status": body.get("status", {})}
        else:
            body.pop("status", None)
        paths = {path for path in leaf_paths(body) if path not in (("apiVersion",), ("kind",))}
        owned = self._owned.setdefault(key, {})
        obj = clone(held) if held else {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {}}
        others = set().union(*(fields for who, fields in owned.items() if who != manager))
        for path in paths:
            if path in others and at(obj, path) != at(body, path) and path[:2] != ("metadata", "ownerReferences"):
                if not force:
                    raise Refused(409, "Conflict", f"Apply failed with 1 conflict: .{'.'.join(path)}")
                for fields in owned.values():
                    fields.discard(path)
        before = owned.get(manager, set())
        for path in paths:
            if at(body, path) == {} and any(each[: len(path)] == path != each for each in before):
                # What the real one makes of a map that loses all its fields, which the CRD's schema then refuses.
                raise Refused(422, "Invalid", f"{'.'.join(path)}: Invalid value: null: must be of type object")
        for path in before - paths - others:
            remove(obj, path)
        references = obj["metadata"].get("ownerReferences") or []
        merge(obj, body)
        mine = (body.get("metadata") or {}).get("ownerReferences")
        if mine is not None:
            uids = {r["uid"] for r in mine}
            obj["metadata"]["ownerReferences"] = [r for r in references if r["uid"] not in uids] + mine
        if resource.plural == "deployments":
            obj.setdefault("spec", {}).setdefault("replicas", 1)
        if call.query.get("dryRun"):
            return 200, obj
        owned[manager] = paths
        return (200 if held else 201), clone(self._store(resource, obj, status=True))

    def own(self, plural: str, name: str, manager: str, path: Path, namespace: str = "llm") -> None:
        """As if `manager` had applied that field."""
        self._owned.setdefault((plural, namespace, name), {}).setdefault(manager, set()).add(path)

    # HTTP

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.path.split("/") if part]
        try:
            if request.path == "/version":
                return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.4"})
            if len(parts) <= 3 and (answer := self._discover(parts)) is not None:
                return web.json_response(answer)
            call, resource = await self._parse(request, parts)
            self.calls.append(call)
            if self.before is not None:
                self.before(call)
            if call.plural in self.missing:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            if call.verb == "watch":
                return await self._watch(request, call, resource)
            status, answer = self.handle(call, resource, request.content_type)
            if call.changes and self.on_write is not None:
                self.on_write()
            if self.after is not None:
                self.after(call)
            return web.json_response(answer, status=status)
        except Refused as error:
            body = {
                "kind": "Status",
                "status": "Failure",
                "code": error.status,
                "reason": error.reason,
                "message": str(error),
            }
            return web.json_response(body, status=error.status, headers=error.headers)

    async def _parse(self, request: web.Request, parts: list[str]) -> tuple[Call, kube.Resource]:
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        resource = self._resources.get(plural)
        if resource is None:
            raise Refused(404, "NotFound", f"no kind {plural}")
        raw = await request.read()
        body = json.loads(raw) if raw else None
        verb = {
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete",
            "GET": "get" if name else "list",
        }[request.method]
        if verb == "list" and request.query.get("watch") in ("true", "1"):
            verb = "watch"
        if verb == "create":
            name = ""
        return Call(verb, plural, namespace, name, subresource, body, dict(request.query)), resource

    def _discover(self, parts: list[str]) -> Object | None:
        groups = sorted({r.api_version for r in RESOURCES if "/" in r.api_version and r.plural not in self.missing})
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            return {"kind": "APIGroupList", "groups": [
                {"name": g.split("/")[0], "versions": [{"groupVersion": g, "version": g.split("/")[1]}],
                 "preferredVersion": {"groupVersion": g, "version": g.split("/")[1]}} for g in groups]}  # fmt: skip
        version = "/".join(parts[1:])
        found = [r for r in RESOURCES if r.api_version == version and r.plural not in self.missing]
        if not found or parts[0] not in ("api", "apis"):
            return None
        verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
        return {"kind": "APIResourceList", "groupVersion": version, "resources": [
            {"name": r.plural, "singularName": r.kind.lower(), "kind": r.kind, "namespaced": r.namespaced,
             "verbs": verbs} for r in found]}  # fmt: skip

    async def _watch(self, request: web.Request, call: Call, resource: kube.Resource) -> web.StreamResponse:
        queue: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        entry = (call.plural, call.namespace, selector(call.query.get("labelSelector", "")), queue)
        self._watchers.append(entry)
        asked = int(call.query.get("resourceVersion") or 0)
        for obj in self.all(call.plural):
            meta = obj["metadata"]
            if (
                int(meta["resourceVersion"]) > asked
                and call.namespace in ("", meta.get("namespace"))
                and matches(obj, entry[2])
            ):
                queue.put_nowait(("ADDED", clone(obj)))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            while True:
                kind, obj = await queue.get()
                if kind == "END":
                    return response
                await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
        finally:
            self._watchers.remove(entry)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeApi]:
        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._serve)
        server = TestServer(app, shutdown_timeout=0.1)
        await server.start_server()
        self.url = str(server.make_url("")).rstrip("/")
        try:
            yield self
        finally:
            self.close_watches()
            await server.close()

    def client(self, **options: Any) -> kube.KubeClient:
        from kubernetes.aio import client

        configuration = client.Configuration(host=self.url)
        configuration.client_session_kwargs = {"trust_env": False}
        return kube.KubeClient(client.ApiClient(configuration), **options)

    def direct(self) -> kube.KubeClient:
        """The same without HTTP between: for tests of many steps. Faults are those of `before` and `after`."""
        return DirectClient(self)


async def eventually(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Return once `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(0.01)
