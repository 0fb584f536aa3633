"""What each trouble says in the conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forebay_operator.api.conditions import Type
from forebay_operator.observe.types import (
    Observation,
    ProblemKind,
)
from forebay_operator.status.remedies import REMEDIES
from support.statuses import (
    DEPLOYMENTS,
    FRESH_POD,
    HEALTHY,
    NO_GPUS,
    condition,
    deployment,
    loads,
    pod,
    status_of,
    unready,
    with_problem,
)

CASES: list[tuple[str, Observation, dict[str, Any], Type, str, str, str]] = [
    # what, observation, changes of the spec, condition, status, reason, part of the message
    ("no router", replace(HEALTHY, router_ready=0), {}, Type.READY, "False", "NoRouterReady", "no router is ready"),
    ("no worker", unready("prefill", "decode"), {}, Type.READY, "False", "NoWorkerReady", "no worker is ready"),
    ("one role", unready("prefill"), {}, Type.READY, "True", "ServingDegraded", "no prefill worker is ready"),
    (
        "one role, refused",
        unready("decode"),
        {"router.fallback": "Refuse"},
        Type.READY,
        "False",
        "NoDecodeWorkerReady",
        "router.fallback is Refuse",
    ),
    (
        "why not ready",
        with_problem(ProblemKind.IMAGE_PULL, unready("prefill", "decode")),
        {},
        Type.READY,
        "False",
        "NoWorkerReady",
        "no worker is ready. Pod llm/x: something is wrong; correct the image",
    ),
    (
        "drained workers do not count",
        replace(HEALTHY, pods=(pod("prefill", draining=True), pod("decode", terminating=True))),
        {},
        Type.READY,
        "False",
        "NoWorkerReady",
        "",
    ),
    (
        "a worker without a role serves in its home pool",
        replace(HEALTHY, pods=(pod("prefill", role=None), pod("decode", role=None))),
        {},
        Type.READY,
        "True",
        "Serving",
        "",
    ),
    ("first look", Observation(generation=1), {}, Type.RECONCILING, "True", "Starting", "children are being made"),
    (
        "first start",
        unready("prefill", "decode"),
        {},
        Type.RECONCILING,
        "True",
        "Starting",
        "waiting for the first workers",
    ),
    (
        "rollout",
        replace(HEALTHY, deployments=(*DEPLOYMENTS, deployment("decode", revision="r2"))),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "decode workers are being moved",
    ),
    (
        "an empty old revision says nothing of a spec that can't be read",
        replace(HEALTHY, deployments=(*DEPLOYMENTS, deployment("decode", 0, revision="r0"))),
        {},
        Type.RECONCILING,
        "False",
        "UpToDate",
        "",
    ),
    (
        "router rollout",
        replace(HEALTHY, deployments=(*DEPLOYMENTS[:2], deployment(None, 2, updated=1))),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "routers are being moved",
    ),
    (
        "the old router is still there",
        replace(HEALTHY, deployments=(*DEPLOYMENTS[:2], deployment(None, 2, pods=3))),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "routers are being moved",
    ),
    (
        "a router of another revision than the spec's",
        replace(HEALTHY, wanted={"prefill-r1": "r1", "decode-r1": "r1", "router-r1": "r2"}),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "routers are being moved",
    ),
    (
        "workers of another revision than the spec's",
        replace(HEALTHY, wanted={"prefill-r1": "r1", "decode-r2": "r2", "router-r1": "r1"}),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "decode workers are being moved",
    ),
    (
        "an empty old revision is there until the last of the latest serves",
        replace(
            unready("decode"),
            deployments=(*DEPLOYMENTS, deployment("decode", 0, revision="r0")),
            wanted={"prefill-r1": "r1", "decode-r1": "r1", "router-r1": "r1"},
        ),
        {},
        Type.RECONCILING,
        "True",
        "RollingOut",
        "decode workers are being moved",
    ),
    (
        "what is left of it is stuck Terminating",
        replace(
            HEALTHY,
            pods=(*HEALTHY.pods, pod("decode", 9, revision="r0", ready=False, terminating=True)),
            deployments=(*DEPLOYMENTS, deployment("decode", 0, revision="r0")),
            wanted={"prefill-r1": "r1", "decode-r1": "r1", "router-r1": "r1"},
        ),
        {},
        Type.RECONCILING,
        "False",
        "UpToDate",
        "",
    ),
    (
        "a person must act before it can go on",
        with_problem(
            ProblemKind.IMAGE_PULL,
            replace(HEALTHY, deployments=(*DEPLOYMENTS, deployment("decode", revision="r2"))),
        ),
        {},
        Type.RECONCILING,
        "False",
        "Stalled",
        "see Stalled",
    ),
    (
        "a rescale is no reconciling",
        replace(HEALTHY, deployments=(deployment("prefill", 3, ready=1), *DEPLOYMENTS[1:])),
        {},
        Type.RECONCILING,
        "False",
        "UpToDate",
        "",
    ),
    *(
        (
            f"stalled by {kind}",
            with_problem(kind),
            {},
            Type.STALLED,
            "True" if REMEDIES[kind].stalls else "False",
            str(REMEDIES[kind].reason) if REMEDIES[kind].stalls else "NotStalled",
            f"Pod llm/x: something is wrong; {REMEDIES[kind].text}" if REMEDIES[kind].stalls else "",
        )
        for kind in ProblemKind
    ),
    (
        "unplaced for a moment",
        replace(HEALTHY, nodes=NO_GPUS, pods=(pod("decode", node=None, ready=False, created_unix=FRESH_POD),)),
        {},
        Type.STALLED,
        "False",
        "NotStalled",
        "",
    ),
    (
        "unplaced for long",
        replace(HEALTHY, nodes=NO_GPUS, pods=(pod("decode", node=None, ready=False),)),
        {},
        Type.STALLED,
        "True",
        "TooFewGPUs",
        "prefill: 1 worker of 1 nvidia.com/gpu each must fit",
    ),
    ("pinning", replace(HEALTHY, nodes=NO_GPUS), {}, Type.PINNING_SATISFIED, "False", "TooFewGPUs", "room for 0"),
    ("no nodes", replace(HEALTHY, nodes=None), {}, Type.PINNING_SATISFIED, "Unknown", "NodesNotReadable", ""),
    ("below target", unready("decode"), {}, Type.POOLS_AVAILABLE, "False", "BelowMinimum", "prefill 1/1, decode 0/1"),
    ("no router to ask", replace(HEALTHY, router_ready=0), {}, Type.METRICS_AVAILABLE, "False", "Missing", "holds"),
    (
        "nobody answers",
        replace(HEALTHY, latency=None, pods=(pod("prefill", load=None), pod("decode", load=None))),
        {},
        Type.METRICS_AVAILABLE,
        "False",
        "Missing",
        "could not be asked",
    ),
    (
        "one is silent",
        replace(HEALTHY, pods=(pod("prefill", load=None), pod("decode"))),
        {},
        Type.METRICS_AVAILABLE,
        "False",
        "Stale",
        "1 of 2 workers have no fresh report",
    ),
    ("off", HEALTHY, {"scaling.mode": "Off"}, Type.SCALING_LIMITED, "False", "ScalingOff", ""),
    (
        "ratio",
        HEALTHY,
        {"scaling.ratio": {"min": "1:4", "max": "1:2"}},
        Type.RATIO_WITHIN_BOUNDS,
        "False",
        "OutOfBounds",
        "1:1 is outside 1:4 to 1:2",
    ),
    ("no ratio", unready("decode"), {}, Type.RATIO_WITHIN_BOUNDS, "Unknown", "NoWorkers", ""),
    ("transport", loads("TCP"), {}, Type.TRANSPORT_READY, "True", "InUse", "workers use 1 x TCP"),
    (
        "as asked",
        loads("RDMA", "RDMA", "Unknown"),
        {"transfer.transport": "RDMA"},
        Type.TRANSPORT_READY,
        "True",
        "AsAsked",
        "2 x RDMA",
    ),
    (
        "better than asked",
        loads("RDMA"),
        {"transfer.transport": "TCP"},
        Type.TRANSPORT_READY,
        "True",
        "AsAsked",
        "1 x RDMA",
    ),
    (
        "worse than asked",
        loads("RDMA", "TCP"),
        {"transfer.transport": "RDMA"},
        Type.TRANSPORT_READY,
        "False",
        "WorseThanAsked",
        "transfer.transport is RDMA; workers use 1 x RDMA, 1 x TCP",
    ),
    (
        "required and not had",
        with_problem(ProblemKind.TRANSPORT),
        {"transfer": {"transport": "RDMA", "required": True}},
        Type.TRANSPORT_READY,
        "False",
        "TransportUnavailable",
        "give the pods a device",
    ),
    (
        "simulated",
        loads("Simulated"),
        {"engine.type": "Simulated"},
        Type.TRANSPORT_READY,
        "True",
        "Simulated",
        "moves no bytes",
    ),
    ("paused", HEALTHY, {"scaling.pause": "ScaleDown"}, Type.PAUSED, "True", "PausedBySpec", "is ScaleDown"),
]


@pytest.mark.parametrize(
    ("observation", "changes", "type_", "verdict", "reason", "message"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_conditions(
    observation: Observation, changes: dict[str, Any], type_: Type, verdict: str, reason: str, message: str
) -> None:
    found = condition(status_of(observation, changes), type_)
    assert (found["status"], found["reason"]) == (verdict, reason)
    assert message in found["message"]
