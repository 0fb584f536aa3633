"""The Kubernetes API as this operator uses it: plain dicts in and out, and errors by what is to be done about them.

Authentication, TLS and token refresh are the official client's; its typed models are not used, since children are built
as dicts (docs/decisions/0010-kubernetes-client.md).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

import aiohttp

from forebay_operator import unreachable
from forebay_operator.api import labels

Object = dict[str, Any]

REQUEST_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 5.0
PAGE: Final = 500
MAX_PAGES: Final = 200
RETRY_AFTER_MOST: Final = 60.0
"""Whatever a server, or a proxy before it, asks for: nothing brings a key forward that waits for it."""

USER_AGENT: Final = "forebay-operator"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind, and where the API serves it."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """Empty for the core group."""
        group, separator, _ = self.api_version.rpartition("/")
        return group if separator else ""

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """`namespace` None: all of them (a list), or the kind has none."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


MODELS: Final = Resource(labels.API_VERSION, labels.KIND, "disaggregatedmodels")
DEPLOYMENTS: Final = Resource("apps/v1", "Deployment", "deployments")
REPLICA_SETS: Final = Resource("apps/v1", "ReplicaSet", "replicasets")
PODS: Final = Resource("v1", "Pod", "pods")
NODES: Final = Resource("v1", "Node", "nodes", namespaced=False)
SERVICES: Final = Resource("v1", "Service", "services")
SECRETS: Final = Resource("v1", "Secret", "secrets")
CONFIG_MAPS: Final = Resource("v1", "ConfigMap", "configmaps")
SERVICE_ACCOUNTS: Final = Resource("v1", "ServiceAccount", "serviceaccounts")
ROLES: Final = Resource("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDINGS: Final = Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
BUDGETS: Final = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICIES: Final = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD_MONITORS: Final = Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
LEASES: Final = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS: Final = Resource("events.k8s.io/v1", "Event", "events")

CHILDREN: Final = (
    DEPLOYMENTS,
    SERVICES,
    SECRETS,
    SERVICE_ACCOUNTS,
    ROLES,
    ROLE_BINDINGS,
    BUDGETS,
    NETWORK_POLICIES,
    POD_MONITORS,
)
"""Kinds that a model's children have."""

_BY_KIND: Final = {(resource.api_version, resource.kind): resource for resource in CHILDREN}


def resource_of(obj: Mapping[str, Any]) -> Resource:
    """Raises KeyError for a kind that no child has."""
    return _BY_KIND[obj["apiVersion"], obj["kind"]]


class ApiError(Exception):
    """The API server's refusal. The classes below say what is to be done."""

    def __init__(self, doing: str, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{doing}: {status} {reason}: {message}"[:2000])
        self.doing = doing
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: the object is not there; or its namespace or kind."""


class Conflict(ApiError):
    """409: somebody else wrote meanwhile. Read again, decide again."""


class AlreadyExists(Conflict):
    pass


class Gone(ApiError):
    """410: a resourceVersion or a list's continuation is too old. List again from the start."""


class Invalid(ApiError):
    """400, 422: the object itself is refused. The same object will be refused again."""


class Forbidden(ApiError):
    """401, 403: RBAC, a quota, pod security, or an admission webhook. Somebody must change something."""


class Throttled(ApiError):
    """429: wait for `retry_after` seconds."""


class Unavailable(ApiError):
    """5xx, no connection, no answer in time. What was asked for may have happened or not."""


class NotLeading(Exception):
    """A write was about to be sent without holding the Lease for certain."""


class Kube(Protocol):
    """Every method raises ApiError. A name that is empty or a list's namespace of None means: of all namespaces."""

    async def get(self, resource: Resource, namespace: str | None, name: str, *, subresource: str = "") -> Object: ...

    async def list(
        self, resource: Resource, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> list[Object]: ...

    async def create(self, resource: Resource, obj: Object) -> Object: ...

    async def replace(self, resource: Resource, obj: Object) -> Object: ...

    async def apply(
        self,
        resource: Resource,
        obj: Object,
        *,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
        manager: str = labels.FIELD_MANAGER,
    ) -> Object:
        """Server-side apply, under our field manager unless another is named."""
        ...

    async def merge(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object: ...

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        """Delete exactly the object with `uid`; its dependants are collected in the background."""
        ...


class KubeClient:
    """`Kube` over the official client's REST layer."""

    def __init__(
        self,
        client: Any,
        *,
        may_write: Callable[[], bool] = lambda: True,
        on_request: Callable[[str, str, str, int], None] = lambda verb, group, plural, status: None,
    ) -> None:
        """`client` is a kubernetes.aio ApiClient. `may_write` is asked before each write but a Lease's: a process that
        slept past its Lease must not write. `on_request` gets verb, group, plural and status (0: no answer)."""
        self._client = client
        self._may_write = may_write
        self._on_request = on_request

    @classmethod
    async def connect(cls, *, kubeconfig: str | None = None, context: str | None = None, **options: Any) -> KubeClient:
        """By a kubeconfig or context that is named, else by the pod's service account, else by $KUBECONFIG or
        ~/.kube/config. Raises ApiError without any."""
        from kubernetes.aio import client, config

        configuration = client.Configuration()
        try:
            try:
                if kubeconfig is not None or context is not None:
                    raise config.ConfigException("another one is named")
                config.load_incluster_config(configuration)
            except config.ConfigException:
                await config.load_kube_config(kubeconfig, context, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise ApiError("finding the API server", 0, "NoConfig", f"{error}; set KUBECONFIG") from error
        # Proxies are for the outside world; the API server is not in it (kopf's networking.trust_env, same reason).
        configuration.client_session_kwargs = {"trust_env": False}
        return cls(client.ApiClient(configuration), **options)

    async def close(self) -> None:
        await self._client.close()

    async def get(self, resource: Resource, namespace: str | None, name: str, *, subresource: str = "") -> Object:
        return await self._request("get", "GET", resource, namespace, name, subresource=subresource)

    async def list(
        self, resource: Resource, namespace: str | None, *, selector: str = "", fields: str = ""
    ) -> list[Object]:
        query = {"limit": str(PAGE)}
        if selector:
            query["labelSelector"] = selector
        if fields:
            query["fieldSelector"] = fields
        restarted = False
        items: list[Object] = []
        for _ in range(MAX_PAGES):
            try:
                page = await self._request("list", "GET", resource, namespace, query=query)
            except Gone:
                if restarted:
                    raise
                # The continuation outlived etcd's history: begin again, once.
                restarted, items = True, []
                query.pop("continue", None)
                continue
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                # A list's items carry neither kind nor version.
                for item in items:
                    item.setdefault("apiVersion", resource.api_version)
                    item.setdefault("kind", resource.kind)
                return items
            query["continue"] = token
        raise ApiError(
            f"list {resource.plural}", 0, "TooMany", f"more than {PAGE * MAX_PAGES} objects; narrow the label"
        )

    async def create(self, resource: Resource, obj: Object) -> Object:
        query = {"fieldManager": labels.FIELD_MANAGER}
        return await self._request("create", "POST", resource, _namespace(obj), query=query, body=obj)

    async def replace(self, resource: Resource, obj: Object) -> Object:
        query = {"fieldManager": labels.FIELD_MANAGER}
        return await self._request("update", "PUT", resource, _namespace(obj), _name(obj), query=query, body=obj)

    async def apply(
        self,
        resource: Resource,
        obj: Object,
        *,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
        manager: str = labels.FIELD_MANAGER,
    ) -> Object:
        query = {
            "fieldManager": manager,
            "force": "true" if force else "false",
            "fieldValidation": "Strict",
        }
        if dry_run:
            query["dryRun"] = "All"
        return await self._request(
            "patch",
            "PATCH",
            resource,
            _namespace(obj),
            _name(obj),
            subresource=subresource,
            query=query,
            body=obj,
            content_type="application/apply-patch+yaml",
        )

    async def merge(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        patch: Object,
        *,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Object:
        query = {"fieldManager": labels.FIELD_MANAGER}
        if dry_run:
            query["dryRun"] = "All"
        return await self._request(
            "patch",
            "PATCH",
            resource,
            namespace,
            name,
            subresource=subresource,
            query=query,
            body=patch,
            content_type="application/merge-patch+json",
        )

    async def delete(
        self, resource: Resource, namespace: str | None, name: str, *, uid: str, resource_version: str | None = None
    ) -> None:
        conditions = {"uid": uid}
        if resource_version is not None:
            conditions["resourceVersion"] = resource_version
        body = {"propagationPolicy": "Background", "preconditions": conditions}
        await self._request("delete", "DELETE", resource, namespace, name, body=body)

    async def _request(
        self,
        verb: str,
        method: str,
        resource: Resource,
        namespace: str | None,
        name: str = "",
        *,
        subresource: str = "",
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        where = f"{namespace}/{name}" if namespace and name else name or namespace or "all namespaces"
        doing = f"{verb} {resource.kind} {where}" + (f" ({subresource})" if subresource else "")
        if method != "GET" and resource is not LEASES and not self._may_write():
            raise NotLeading(f"{doing}: not sent, this operator no longer holds its Lease")
        url = self._client.configuration.host.rstrip("/") + resource.path(namespace, name, subresource)
        if query:
            url += "?" + urlencode(query)
        headers = {"Content-Type": content_type, "Accept": "application/json", "User-Agent": USER_AGENT}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
        plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
        status = 0
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                response = await self._client.call_api(
                    method,
                    url,
                    headers,
                    body,
                    _request_timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS, connect=CONNECT_SECONDS),
                )
                raw = await response.read()
            status = response.status
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError) and not str(error)
            text = f"no answer within {REQUEST_SECONDS:.0f} s" if silent else unreachable.reason(error)
            raise Unavailable(doing, 0, type(error).__name__, text) from error
        finally:
            self._on_request(verb, resource.group, plural, status)
        if status >= 300:
            raise error_of(doing, status, raw, response.headers.get("Retry-After"))
        try:
            answer: Object = json.loads(raw)
        except ValueError as error:
            raise Unavailable(doing, status, "BadAnswer", "the answer is not JSON") from error
        return answer


_BY_STATUS: Final = {400: Invalid, 401: Forbidden, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone,
                     413: Invalid, 422: Invalid, 429: Throttled}  # fmt: skip


def error_of(doing: str, status: int, raw: bytes, retry_after: str | None) -> ApiError:
    """The error for a response, from its metav1.Status where it has one."""
    reason, message = "", raw[:200].decode(errors="replace")
    try:
        answer = json.loads(raw)
        reason, message = str(answer.get("reason") or ""), str(answer.get("message") or "")
    except (ValueError, AttributeError):
        pass
    seconds = min(float(retry_after), RETRY_AFTER_MOST) if retry_after and retry_after.isdigit() else None
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else ApiError)
    if kind is Conflict and reason == "AlreadyExists":
        kind = AlreadyExists
    if kind is Invalid and "metadata.uid" in message:
        # A patch that names a uid finds another object of that name: the server calls the uid immutable.
        kind = Conflict
    if kind is Throttled and seconds is None:
        seconds = 1.0
    return kind(doing, status, reason, message, seconds)


def _namespace(obj: Mapping[str, Any]) -> str | None:
    namespace: str | None = obj["metadata"].get("namespace")
    return namespace


def _name(obj: Mapping[str, Any]) -> str:
    name: str = obj["metadata"]["name"]
    return name
