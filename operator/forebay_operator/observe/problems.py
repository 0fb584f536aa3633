"""What is wrong with children, read off the objects themselves. Pure.

Messages hold no name, number or time that changes from one retry to the next: they go to status, which is written only
when it changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from forebay_operator.api.labels import KIND, Pool
from forebay_operator.calibrate.believed import read_speeds
from forebay_operator.observe.objects import condition, is_ready, pool_of, unix_time
from forebay_operator.observe.types import PodView, Problem, ProblemKind
from forebay_operator.status.transport import is_worse
from forebay_wire import exit_codes

Object = Mapping[str, Any]

_IMAGE: Final = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_CONFIG: Final = {"CreateContainerConfigError", "CreateContainerError"}
_NODES_COUNT: Final = re.compile(r"^\d+/(\d+) nodes are available: ")
_VOLUMES: Final = re.compile(r"persistent ?volume|\bpvc?\(s\)|volume node affinity", re.IGNORECASE)
"""In the scheduler's words: a claim that is not bound, or is bound to a volume that these nodes can't mount."""

_LIMIT: Final = 512
_WORDS_LIMIT: Final = 400

SET_UP_SECONDS: Final = 120.0
"""From a pod's place on a node to its first container's start; a disk may take a minute to come to another node."""


def problems(
    deployments: Iterable[Object], replica_sets: Iterable[Object], pods: Iterable[Object], now: float
) -> tuple[Problem, ...]:
    """At most one a child object and kind; equal ones of several pods of a pool are said once. `now`: Unix seconds."""
    found: dict[tuple[object, ...], Problem] = {}
    for obj in (*deployments, *replica_sets):
        problem = _refused_pods(obj)
        if problem is not None:
            found.setdefault((problem.kind, problem.pool, problem.message), problem)
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        if pod["metadata"].get("deletionTimestamp") or is_ready(pod):
            continue
        problem = _scheduling(pod) or _containers(pod) or _set_up(pod, now)
        if problem is not None:
            found.setdefault((problem.kind, problem.pool, problem.message), problem)
    return tuple(found.values())


def transport_problems(spec: Mapping[str, Any], pods: Iterable[PodView]) -> tuple[Problem, ...]:
    """Workers on a worse transport than transfer.required allows, by their own account. Once a pool."""
    transfer = spec.get("transfer") or {}
    if not transfer.get("required"):
        return ()
    asked, found = str(transfer.get("transport")), dict[Pool, Problem]()
    for pod in pods:
        if pod.load is not None and not pod.terminating and is_worse(pod.load.transport, asked):
            text = f"KV moves over {pod.load.transport}, and transfer.required asks for {asked}"
            found.setdefault(pod.pool, Problem(ProblemKind.TRANSPORT, f"Pod {pod.name}", text, pod.pool))
    return tuple(found.values())


def performance_model_problem(model: Object) -> tuple[Problem, ...]:
    """A spec.scaling.performanceModel that can't be read: serving and the law go on without it."""
    text = ((model.get("spec") or {}).get("scaling") or {}).get("performanceModel")
    if not isinstance(text, str):
        return ()
    try:
        read_speeds(text)
    except ValueError as error:
        meta = model["metadata"]
        name = f"{KIND} {meta.get('namespace', '')}/{meta['name']}"
        return (Problem(ProblemKind.INVALID_SPEC, name, str(error)[:_LIMIT]),)
    return ()


def _refused_pods(obj: Object) -> Problem | None:
    """A controller was refused its pods: by a quota, by pod security, by an admission webhook."""
    failure = condition(obj, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    message = str(failure.get("message", ""))
    kind = ProblemKind.QUOTA_EXCEEDED if "exceeded quota" in message else ProblemKind.REJECTED
    # The refused pod's name is made up anew each time: `pods "assistant-decode-1a2b-x7k2p" is forbidden: ...`.
    return _problem(kind, obj, re.sub(r'^pods? "[^"]*" ', "pods ", message))


def _scheduling(pod: Object) -> Problem | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    message = _NODES_COUNT.sub(r"none of \1 nodes: ", str(scheduled.get("message", "")))
    if re.search(r'persistentvolumeclaim "[^"]+" not found', message):
        return _problem(ProblemKind.MISSING_OBJECT, pod, message)
    if _VOLUMES.search(message):
        # It does not say which of the pod's claims.
        claims = ", ".join(_claims(pod))
        return _problem(ProblemKind.CLAIM, pod, f"claims {claims}: {message}" if claims else message)
    return _problem(ProblemKind.UNSCHEDULABLE, pod, message)


def _claims(pod: Object) -> list[str]:
    volumes = (pod.get("spec") or {}).get("volumes") or []
    return sorted({v["persistentVolumeClaim"]["claimName"] for v in volumes if v.get("persistentVolumeClaim")})


def _containers(pod: Object) -> Problem | None:
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, name = waiting.get("reason", ""), container["name"]
        if reason in _IMAGE:
            return _problem(
                ProblemKind.IMAGE_PULL, pod, f"container {name}: image {container.get('image')} can't be pulled"
            )
        if reason in _CONFIG:
            return _problem(ProblemKind.MISSING_OBJECT, pod, f"container {name}: {waiting.get('message', reason)}")
        if reason == "CrashLoopBackOff":
            ended = (container.get("lastState") or {}).get("terminated") or {}
            why = "" if ended.get("reason") in (None, "Error") else f" ({ended['reason']})"
            said = _last_words(ended)
            text = (
                f"container {name} ended with exit code {ended.get('exitCode')}{why}{said and f': {said}'}; see its log"
            )
            return _problem(ProblemKind.CRASHING, pod, text)
    return None


def _last_words(ended: Object) -> str:
    """The cause and the remedy by which one of ours says that no new start mends it: its last line, the same each time.
    What others say last is kept out, it may hold anything."""
    if ended.get("exitCode") != exit_codes.CONFIG:
        return ""
    lines = str(ended.get("message") or "").strip().splitlines()
    last = lines[-1] if lines else ""
    return "".join(character for character in last if character.isprintable())[:_WORDS_LIMIT]


def _set_up(pod: Object, now: float) -> Problem | None:
    """What a kubelet waits for before any container, a volume mostly, it tells in Events only."""
    scheduled = condition(pod, "PodScheduled")
    if condition(pod, "PodReadyToStartContainers").get("status") != "False" or scheduled.get("status") != "True":
        return None
    if now - unix_time(scheduled.get("lastTransitionTime")) <= SET_UP_SECONDS:
        return None
    return _problem(ProblemKind.VOLUME, pod, "it has a node, but its volumes or its network are not set up there")


def _problem(kind: ProblemKind, obj: Object, message: str) -> Problem:
    meta = obj["metadata"]
    return Problem(kind, f"{obj['kind']} {meta.get('namespace', '')}/{meta['name']}", message[:_LIMIT], pool_of(obj))
