"""The steps of a change as the API server shows them, to kill the operators at one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from e2e.on_kubernetes import disruptions
from e2e.on_kubernetes.scene import Scene
from forebay_operator import kube as k
from forebay_operator.act.operation import Operation
from forebay_operator.api import labels

LOOK_SECONDS: Final = 0.05

Step = tuple[str, str]
"""What is seen, in words, and the uid of the worker that leaves (empty without an operation)."""


def step_of(model: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Step:
    """Pure. `pods` are the workers, also those that end."""
    operation = Operation.from_status(model.get("status", {}).get("operation"))
    if operation is None:
        return _roles(pods), ""
    pod = next((pod for pod in pods if pod["metadata"]["uid"] == operation.uid), None)
    if pod is None:
        what = "gone"
    elif pod["metadata"].get("deletionTimestamp"):
        what = "ending"
    elif not _ready(pod):
        what = "silent"
    elif labels.DRAINING in pod["metadata"]["labels"]:
        what = "fenced"
    else:
        what = "recorded"
    return what, operation.uid


def _roles(pods: Sequence[Mapping[str, Any]]) -> str:
    held = [pod["metadata"]["labels"].get(labels.ROLE) for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    ending = sum("deletionTimestamp" in pod["metadata"] for pod in pods)
    return f"roles {held.count('prefill')}:{held.count('decode')}:{held.count(None)}, {ending} ending"


def _ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@dataclass
class Killing:
    """Operators are killed once, when the step of that number begins; 0 is what is there before the change."""

    at: int
    seen: list[Step] = field(default_factory=list)
    killed: str = ""
    """The step, in words; empty: the change had fewer steps."""


@contextlib.asynccontextmanager
async def operators_killed(scene: Scene, at: int) -> AsyncIterator[Killing]:
    """While the body makes a change, as its steps show."""
    killing, over = Killing(at), asyncio.Event()
    watching = asyncio.create_task(_watch(scene, killing, over))
    try:
        yield killing
    finally:
        # Not cancelled: a kill that has begun is carried out.
        over.set()
        ended = await asyncio.gather(watching, return_exceptions=True)
    if ended[0] is not None:
        raise ended[0]


async def _watch(scene: Scene, killing: Killing, over: asyncio.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(k.NotFound, k.Unavailable):
            step = step_of(await scene.site.model(), await scene.site.pods())
            if step not in killing.seen:
                killing.seen.append(step)
                if len(killing.seen) == killing.at + 1:
                    await disruptions.kill_operators(scene)
                    killing.killed = step[0]
        await asyncio.sleep(LOOK_SECONDS)
