"""Controllers, kubelets and workers on the fake API server: what a Deployment becomes, without any process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forebay_operator.api import labels
from forebay_operator.observe.load import Loads, RouterReport, WorkerState, combine
from forebay_operator.observe.types import LatencyView
from forebay_wire.load import LoadReport
from forebay_wire.messages import DrainResponse
from support.fake_kube import FakeApi, Object, clone

_RUNNING: Object = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
_UNSCHEDULABLE: Object = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        }
    ],
}
COST = "controller.kubernetes.io/pod-deletion-cost"


@dataclass
class FakeCluster:
    """Attach with `api.on_write = cluster.control`. It is also the operator's `Workers`."""

    api: FakeApi
    running: dict[str, int] = field(default_factory=dict)
    """Requests that run on a worker, by pod name."""

    unready: bool = False
    """New pods stay NotReady."""

    kubelet: bool = False
    """Somebody else runs the pods: they come without a status, and are only marked when they are to go."""

    latency: LatencyView | None = None
    """What the routers say of it."""

    transport: str = "Unknown"
    """That workers report."""

    broken: Object | None = None
    """Status of new pods, instead of a running one."""

    refusal: str = ""
    """What ReplicaSets are told when they make pods."""

    places: int | None = None
    """Workers that nodes have room for; None: any number."""

    deaf: bool = False
    """Workers and routers do not answer."""

    moved: dict[str, int] = field(default_factory=dict)
    """Requests that were handed on to other workers, by the pod that they ran on."""

    deleted: list[tuple[Object, int]] = field(default_factory=list)
    """Pods that went, with the requests that ran on them."""

    def __post_init__(self) -> None:
        self._count = itertools.count(1)

    def control(self) -> None:
        """Bring ReplicaSets and pods to what the Deployments say."""
        self._schedule()
        for deployment in self.api.all("deployments"):
            replica_set = self._replica_set(deployment)
            want = deployment["spec"]["replicas"]
            pods = self._staying(replica_set)
            for pod in sorted(pods, key=self._order)[: max(0, len(pods) - want)]:
                self.kill(pod["metadata"]["name"])
            refused = bool(self.refusal) and want > len(pods)
            for _ in range(0 if refused else want - len(pods)):
                self._pod(deployment, replica_set)
            pods = self._staying(replica_set)
            ready = sum(self.is_ready(pod) for pod in pods)
            live = clone(self.api.find("deployments", deployment["metadata"]["name"]))
            assert live is not None
            live["status"] = {
                "observedGeneration": live["metadata"]["generation"],
                "replicas": len(pods),
                "updatedReplicas": len(pods),
                "readyReplicas": ready,
            }
            if refused:
                failure = {"type": "ReplicaFailure", "status": "True", "message": self.refusal}
                live["status"]["conditions"] = [failure]
            self.api.put(live)

    def _schedule(self) -> None:
        """Pods that found no node get one as soon as there is room."""
        for pod in self.workers():
            if "nodeName" not in pod["spec"] and self._room():
                placed = clone(pod)
                placed["spec"]["nodeName"] = "node1"
                placed["status"] = {**_RUNNING, "podIP": "10.99.0.1"}
                self.api.put(placed)

    def _room(self) -> bool:
        return self.places is None or sum("nodeName" in pod["spec"] for pod in self.workers()) < self.places

    def _staying(self, replica_set: Object) -> list[Object]:
        """What a ReplicaSet counts: neither pods that leave nor those that have ended."""
        return [
            p
            for p in self.pods(replica_set["metadata"]["uid"])
            if not p["metadata"].get("deletionTimestamp") and p["status"].get("phase") not in ("Failed", "Succeeded")
        ]

    def pods(self, replica_set: str | None = None, **marks: str) -> list[Object]:
        return [
            pod
            for pod in self.api.all("pods")
            if (replica_set is None or pod["metadata"]["ownerReferences"][0]["uid"] == replica_set)
            and all(pod["metadata"]["labels"].get(key) == value for key, value in marks.items())
        ]

    def workers(self, pool: str | None = None) -> list[Object]:
        return [
            p
            for p in self.api.all("pods")
            if p["metadata"]["labels"].get(labels.POOL) in ((pool,) if pool else labels.POOLS)
        ]

    def roles(self) -> dict[str, int]:
        held = [pod["metadata"]["labels"].get(labels.ROLE) for pod in self.workers()]
        return {role: held.count(role) for role in labels.POOLS}

    @staticmethod
    def is_ready(pod: Object) -> bool:
        conditions = (pod.get("status") or {}).get("conditions") or []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def cure(self) -> None:
        """What was broken gets well, as kubelets and controllers try again."""
        broken, self.broken, self.refusal, self.places = self.broken, None, "", None
        for pod in self.api.all("pods"):
            if broken is not None and pod["status"] == broken:
                self.api.put({**clone(pod), "status": {**_RUNNING, "podIP": "10.98.0.1"}})
        self.control()

    def set_ready(self, name: str, ready: bool) -> None:
        pod = clone(self.api.find("pods", name))
        assert pod is not None
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
        self.api.put(pod)
        self.control()

    def kill(self, name: str) -> None:
        pod = self.api.find("pods", name)
        assert pod is not None
        self.deleted.append((pod, self.running.pop(name, 0)))
        if self.kubelet:
            marked = clone(pod)
            marked["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.api.put(marked)
        else:
            self.api.remove("pods", name)

    def evict(self, name: str) -> None:
        """As a kubelet does that runs out of memory: the pod ends and stays, as Failed, and another one is made."""
        pod = clone(self.api.find("pods", name))
        conditions = [{"type": "Ready", "status": "False"}]
        pod["status"] = {**pod["status"], "phase": "Failed", "reason": "Evicted", "conditions": conditions}
        self.api.put(pod)
        self.control()

    def _order(self, pod: Object) -> tuple[bool, int, int]:
        """A ReplicaSet's: NotReady first, then the cheapest, then the youngest."""
        cost = int((pod["metadata"].get("annotations") or {}).get(COST, "0"))
        return (self.is_ready(pod), cost, -int(pod["metadata"]["name"].rsplit("-", 1)[1]))

    def _replica_set(self, deployment: Object) -> Object:
        meta = deployment["metadata"]
        held = self.api.find("replicasets", meta["name"] + "-rs", meta["namespace"])
        if held is not None:
            return held
        return self.api.put({
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": meta["name"] + "-rs",
                "namespace": meta["namespace"],
                "labels": dict(deployment["spec"]["template"]["metadata"]["labels"]),
                "ownerReferences": [_controller(deployment)],
            },
            "spec": {},
        })  # fmt: skip

    def _pod(self, deployment: Object, replica_set: Object) -> None:
        number = next(self._count)
        node = f"node{number % 2 + 1}"
        placed = labels.POOL not in deployment["spec"]["template"]["metadata"]["labels"] or self._room()
        address = f"10.88.{number // 250}.{number % 250 + 1}"
        conditions = [{"type": "Ready", "status": "False" if self.unready else "True"}]
        status = self.broken or {**_RUNNING, "podIP": address, "conditions": conditions}
        self.api.put({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{deployment['metadata']['name']}-{number}",
                "namespace": deployment["metadata"]["namespace"],
                "labels": dict(deployment["spec"]["template"]["metadata"]["labels"]),
                "ownerReferences": [_controller(replica_set)],
            },
            "spec": {**deployment["spec"]["template"]["spec"], **({"nodeName": node} if placed else {})},
            "status": {} if self.kubelet else status if placed else _UNSCHEDULABLE,
        })  # fmt: skip

    # Workers (observe/load.py)

    async def loads(self, routers: Sequence[str]) -> Loads:
        if self.deaf:
            return combine([None for _ in routers])
        seen = [self._state(pod) for pod in self.workers() if self.is_ready(pod)]
        return replace(combine([RouterReport(workers=seen) for _ in routers]), latency=self.latency)

    def _state(self, pod: Object) -> WorkerState:
        name = pod["metadata"]["name"]
        draining = labels.DRAINING in pod["metadata"]["labels"]
        running = self.running.get(name, 0)
        load = LoadReport("e", 1, ready=True, running=running, transport=self.transport)
        return WorkerState(name, "draining" if draining else "ready", 0.1, load)

    async def drain(self, address: str, token: str, draining: bool, *, move: bool = False) -> DrainResponse | None:
        if self.deaf:
            return None
        assert len(token) >= 32
        for pod in self.workers():
            if pod["status"].get("podIP") == address:
                if move:
                    name = pod["metadata"]["name"]
                    self.moved[name] = self.moved.get(name, 0) + self.running.pop(name, 0)
                self.set_ready(pod["metadata"]["name"], not draining)
                return DrainResponse(draining, self.running.get(pod["metadata"]["name"], 0), 0)
        return None


def simulated_model(prefill: int = 1, decode: int = 2, name: str = "assistant", **spec: Any) -> Object:
    """A model as a user would write it, with fixed pools."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name, "namespace": "llm"},
        "spec": {
            "model": {"servedName": "assistant"},
            "engine": {"type": "Simulated", "kvCache": {"memory": "1Gi"}},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "router": {"replicas": 1},
            **spec,
        },
    }


def native_model(prefill: int = 1, decode: int = 2, **spec: Any) -> Object:
    """One GPU a worker, of one kind for both pools."""
    engine = {"type": "Native", "kvCache": {"memory": "1Gi"}}
    source = {"servedName": "assistant", "source": "pvc://models/assistant"}
    return simulated_model(prefill, decode, engine=engine, model=source, **spec)


def _controller(obj: Object) -> dict[str, Any]:
    meta = obj["metadata"]
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
    }
