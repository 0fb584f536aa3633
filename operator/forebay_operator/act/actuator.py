"""The writes that a plan asks for: role labels, fencing, counts. One small idempotent patch each."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Final

from forebay_operator.act.apply import Applier, Owner, check_owned, key_of, owned
from forebay_operator.act.roles import RoleChange
from forebay_operator.api import labels
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.build.names import token_secret_name
from forebay_operator.build.secret import KEY, token_secret
from forebay_operator.kube import DEPLOYMENTS, PODS, SECRETS, Kube, NotFound, Object
from forebay_operator.observe.load import Workers
from forebay_operator.observe.types import PodView

log = logging.getLogger(__name__)

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
LEAVING_COST: Final = "-1000"
"""Should the worker not turn NotReady, this still makes it the first of the ready ones to go."""

TOKEN_BYTES: Final = 32
TOKEN_SECONDS: Final = 10.0
"""Between two looks at a model's Secret."""


class Actuator:
    def __init__(self, kube: Kube, applier: Applier, workers: Workers) -> None:
        self._kube = kube
        self._applier = applier
        self._workers = workers
        self._tokens: dict[str, str] = {}
        self._checked: dict[str, float] = {}

    async def ensure_token(self, model: DisaggregatedModel, owner: Owner, now: float) -> None:
        """Make the model's Secret unless there is one. Its value is never changed and never logged.

        It is looked at again with the reconciles, `TOKEN_SECONDS` apart (`now` in seconds): a watch of Secrets would
        take the right to read them all. One that was deleted comes back with the value that running pods know.
        """
        checked = self._checked.get(owner.uid)
        if checked is not None and 0 <= now - checked < TOKEN_SECONDS:
            return
        try:
            held = await self._kube.get(SECRETS, owner.namespace, token_secret_name(model.metadata.name))
        except NotFound:
            value = self._tokens.get(owner.uid) or secrets.token_hex(TOKEN_BYTES)
            secret = token_secret(model, value.encode())
            # The cache may still hold the one that is gone.
            self._applier.cache.drop(key_of(owned(secret, owner)))
            await self._applier.apply(secret, owner)
        else:
            check_owned({**held, "kind": SECRETS.kind}, owner)
            value = base64.b64decode(held.get("data", {}).get(KEY, "")).decode("ascii", "replace")
        self._tokens[owner.uid] = value
        self._checked[owner.uid] = now

    def forget(self, uid: str) -> None:
        self._tokens.pop(uid, None)
        self._checked.pop(uid, None)

    async def set_role(self, namespace: str, change: RoleChange) -> bool:
        return await self._label(namespace, change.pod, change.uid, {labels.ROLE: change.role})

    async def fence(self, namespace: str, pod: PodView) -> bool:
        """Routers send it nothing new from when they see the label."""
        return await self._label(namespace, pod.name, pod.uid, {labels.DRAINING: "true"}, {DELETION_COST: LEAVING_COST})

    async def silence(self, owner: Owner, pod: PodView) -> None:
        """Its readiness probe fails from now on, and what still runs there continues on another worker at once."""
        if pod.ip is not None:
            await self._workers.drain(pod.ip, self._tokens.get(owner.uid, ""), True, move=True)

    async def release(self, owner: Owner, pod: PodView) -> None:
        """Take fence and silence back."""
        await self._label(owner.namespace, pod.name, pod.uid, {labels.DRAINING: None}, {DELETION_COST: None})
        if pod.ip is not None and pod.load is not None and pod.load.draining:
            await self._workers.drain(pod.ip, self._tokens.get(owner.uid, ""), False)

    async def scale(self, deployment: Object, replicas: int) -> Object:
        """Set the count of a Deployment of an older revision, whose template nobody builds any more.

        Raises Conflict when it changed since it was read: the decision was made on what was read.
        """
        meta = deployment["metadata"]
        patch = {
            "metadata": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "spec": {"replicas": replicas},
        }
        return await self._kube.merge(DEPLOYMENTS, meta["namespace"], meta["name"], patch)

    async def _label(
        self,
        namespace: str,
        pod: str,
        uid: str,
        marks: Mapping[str, str | None],
        annotations: Mapping[str, str | None] | None = None,
    ) -> bool:
        """False when the pod is gone meanwhile. The uid keeps a pod of the same name from getting it."""
        metadata: dict[str, Any] = {"uid": uid, "labels": dict(marks)}
        if annotations:
            metadata["annotations"] = dict(annotations)
        try:
            await self._kube.merge(PODS, namespace, pod, {"metadata": metadata})
        except NotFound:
            return False
        return True


async def all_of(*work: Any) -> list[Any]:
    """Await all, then raise the first error: one pod's trouble must not keep the others waiting."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
