"""Status from observations: every condition by table, what a reader and GitOps tools see, and that it comes to rest."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_operator.api.conditions import Type
from forebay_operator.observe.types import (
    LatencyView,
    Observation,
    Problem,
    ProblemKind,
)
from support.admission import admit
from support.manifests import changed
from support.statuses import (
    CRD,
    DEPLOYMENTS,
    HEALTHY,
    NO_GPUS,
    NODES,
    NOW,
    STATUS_SCHEMA,
    condition,
    deployment,
    kstatus,
    loads,
    pod,
    report,
    status_of,
    unready,
    with_problem,
)
from support.structural import faults_of


def test_a_model_that_serves() -> None:
    status = status_of(HEALTHY)
    shown = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert shown == {
        "Ready": ("True", "Serving"),
        "Reconciling": ("False", "UpToDate"),
        "Stalled": ("False", "NotStalled"),
        "PoolsAvailable": ("True", "AtTarget"),
        "PinningSatisfied": ("True", "NodesMatch"),
        "MetricsAvailable": ("True", "Fresh"),
        "ScalingLimited": ("Unknown", "NotDecided"),
        "RatioWithinBounds": ("True", "WithinBounds"),
        "TransportReady": ("Unknown", "NotMeasured"),
        "Paused": ("False", "NotPaused"),
        "ForeignWriter": ("False", "SoleWriter"),
    }
    status.pop("conditions")
    assert status == {
        "observedGeneration": 3,
        "summary": "Serving: 1 prefill and 1 decode workers serve",
        "replicas": 2,
        "selector": "forebay.dev/model=assistant,app.kubernetes.io/component=worker",
        "prefill": {"replicas": 1, "serving": 1, "target": 1, "onLoan": 0, "summary": "1/1"},
        "decode": {"replicas": 1, "serving": 1, "target": 1, "onLoan": 0, "summary": "1/1"},
        "ratio": "1:1",
        "latency": {
            "timeToFirstTokenP95Milliseconds": 640,
            "timePerOutputTokenP95Milliseconds": 31,
            "attainmentPercent": 99,
        },
        "transport": {"inUse": "Unknown"},
        "endpoint": "http://assistant-router.llm.svc:8000/v1",
    }


def test_a_status_is_what_the_crd_takes() -> None:
    for observation in (HEALTHY, Observation(generation=1)):
        _, faults = admit({**changed({}), "status": status_of(observation)}, CRD)
        assert faults == []


def test_a_pool_below_its_target_but_not_its_minimum() -> None:
    found = condition(status_of(HEALTHY, targets={"prefill": 1, "decode": 3}), Type.POOLS_AVAILABLE)
    assert (found["status"], found["reason"]) == ("False", "BelowTarget")


def test_workers_on_loan_and_those_that_leave() -> None:
    pods = (
        pod("prefill", 0),
        pod("prefill", 1, terminating=True),
        *(pod("decode", index) for index in range(5)),
        pod("decode", 5, role="prefill"),
    )
    status = status_of(replace(HEALTHY, pods=pods), targets={"prefill": 2, "decode": 5})
    assert status["prefill"] == {"replicas": 1, "serving": 2, "target": 2, "onLoan": 0, "summary": "2/2"}
    assert status["decode"] == {"replicas": 6, "serving": 5, "target": 5, "onLoan": 1, "summary": "5/5"}
    assert (status["ratio"], status["replicas"]) == ("2:5", 7)


def test_the_transport_is_measured() -> None:
    status = status_of(loads("RDMA", "RDMA", kv_bytes_received=8_620_000_000, kv_seconds=0.2))
    assert status["transport"] == {"inUse": "RDMA", "measuredGigabytesPerSecond": "43.1"}
    assert status["summary"].startswith("Serving over RDMA: ")
    assert status_of(loads("RDMA", "TCP"))["transport"] == {"inUse": "Mixed"}


def test_a_spec_that_cannot_be_read_keeps_what_serves_and_calls_for_a_person() -> None:
    problem = Problem(ProblemKind.INVALID_SPEC, "DisaggregatedModel llm/assistant", "spec.engine.type: VLLM is not")
    status = status_of(replace(HEALTHY, problems=(problem,)), readable=False)
    assert condition(status, Type.READY)["status"] == "True"
    stalled = condition(status, Type.STALLED)
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert status["observedGeneration"] == 3
    assert "Needs a person: DisaggregatedModel llm/assistant: spec.engine.type" in status["summary"]


def test_a_cured_problem_clears_by_itself() -> None:
    broken = status_of(with_problem(ProblemKind.MISSING_OBJECT))
    cured = status_of(HEALTHY, previous=broken, now=NOW + timedelta(hours=1))
    assert condition(cured, Type.STALLED)["status"] == "False"
    assert condition(cured, Type.STALLED)["lastTransitionTime"] == "2026-01-01T13:00:00Z"
    assert condition(cured, Type.READY)["lastTransitionTime"] == "2026-01-01T12:00:00Z"


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (HEALTHY, "Current"),
        (replace(HEALTHY, router_ready=0), "InProgress"),
        (unready("decode"), "Current"),
        (Observation(generation=3), "InProgress"),
        (with_problem(ProblemKind.IMAGE_PULL), "Failed"),
        (with_problem(ProblemKind.UNSCHEDULABLE), "Current"),
    ],
)
def test_what_flux_and_helm_wait_for(observation: Observation, expected: str) -> None:
    assert kstatus(3, status_of(observation)) == expected


def test_before_the_operator_and_with_a_newer_spec_it_is_in_progress() -> None:
    assert kstatus(1, {"observedGeneration": -1}) == "InProgress"
    assert kstatus(4, status_of(HEALTHY)) == "InProgress"


def test_small_moves_of_figures_are_not_written_and_large_ones_are() -> None:
    first = status_of(loads("TCP", kv_bytes_received=10**9, kv_seconds=1.0))
    near = replace(loads("TCP", kv_bytes_received=int(1.05e9), kv_seconds=1.0), latency=LatencyView(660, 30, 98))
    later = NOW + timedelta(hours=1)
    assert status_of(near, previous=first, now=later) == first
    far = status_of(replace(near, latency=LatencyView(800, 30, 90)), previous=first, now=later)
    assert far["latency"]["timeToFirstTokenP95Milliseconds"] == 800
    assert far["latency"]["timePerOutputTokenP95Milliseconds"] == 31
    assert far["latency"]["attainmentPercent"] == 90


def test_what_others_own_survives() -> None:
    decision = {"time": "2026-01-01T00:00:00Z", "action": "Hold", "reason": "Steady", "limitedBy": "maxGPUs"}
    foreign = {**condition(status_of(HEALTHY), Type.READY), "type": "example.com/Audited"}
    previous = {"decision": decision, "decisions": [decision], "conditions": [foreign], "memory": {"a": 1}}
    status = status_of(HEALTHY, previous=previous)
    assert (status["decision"], status["decisions"]) == (decision, [decision])
    assert foreign["type"] not in {c["type"] for c in status["conditions"]}, "applied, it would become ours"
    assert "memory" not in status
    limited = condition(status, Type.SCALING_LIMITED)
    assert (limited["status"], limited["message"]) == ("True", "the last decision was limited by maxGPUs")


@pytest.mark.parametrize(
    ("decided", "limited_by", "reason", "said"),
    [
        (("AtMost", None), "Bounds", "TooManyReplicas", "Bounds (set by the bounds in scaling.prefill and scaling."),
        (("Short", None), "Bounds", "TooManyReplicas", "scaling.decode"),
        (("Balanced", "AtMost"), "Bounds", "TooManyReplicas", "scaling.prefill"),
        (("AtLeast", None), "Bounds", "TooFewReplicas", "scaling.prefill"),
        (("NoTraffic", "AtLeast"), "Bounds", "TooFewReplicas", "scaling.prefill"),
        (("Starved", "Fits"), "Bounds", "SplitOutOfBounds", "scaling.prefill"),
        (("Starved", None), "Ratio,Budget", "LimitedByRatio", "Ratio (set by scaling.ratio); Budget (set by scaling."),
        (("AtMost", None), "Budget", "LimitedByBudget", "scaling.maxGPUs"),
        (("Short", None), "RateLimit", "LimitedByRate", "policies in scaling.behavior"),
        (("Paused", None), "Pause", "LimitedByPause", "scaling.pause"),
    ],
)
def test_a_limited_decision_says_by_what_and_where_that_is_set(
    decided: tuple[str, str | None], limited_by: str, reason: str, said: str
) -> None:
    decision: dict[str, Any] = {"time": "2026-01-01T00:00:00Z", "action": "Hold", "limitedBy": limited_by}
    decision["reason"] = decided[0]
    if decided[1] is not None:
        decision["inputs"] = {"workers": decided[1]}
    limited = condition(status_of(HEALTHY, previous={"decision": decision}), Type.SCALING_LIMITED)
    assert (limited["status"], limited["reason"]) == ("True", reason)
    assert said in limited["message"]


pods = st.builds(
    pod,
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 9),
    ready=st.booleans(),
    draining=st.booleans(),
    terminating=st.booleans(),
    role=st.sampled_from(["prefill", "decode", None]),
    node=st.sampled_from(["n", None]),
    load=st.none() | st.builds(report, transport=st.sampled_from(["TCP", "RDMA", "Unknown", "new"])),
)


observations = st.builds(
    Observation,
    generation=st.integers(1, 9),
    pods=st.lists(pods, max_size=6).map(tuple),
    deployments=st.lists(st.sampled_from([*DEPLOYMENTS, deployment("decode", 2, revision="r2")]), unique=True).map(
        tuple
    ),
    nodes=st.none() | st.just(NODES) | st.just(NO_GPUS) | st.just(()),
    router_ready=st.integers(0, 2),
    latency=st.none() | st.builds(LatencyView, st.none() | st.integers(0, 9999)),
    problems=st.lists(
        st.builds(Problem, st.sampled_from(ProblemKind), st.just("Pod x"), st.sampled_from(["m", "m" * 5000])),
        max_size=3,
    ).map(tuple),
)


@settings(max_examples=150, deadline=None)
@given(observations, st.booleans())
def test_any_observation_gives_a_valid_status_that_comes_to_rest(observation: Observation, readable: bool) -> None:
    first = status_of(observation, readable=readable)
    assert {c["type"] for c in first["conditions"]} == set(Type)
    assert all(c["reason"] and c["observedGeneration"] == observation.generation for c in first["conditions"])
    assert list(faults_of(first, STATUS_SCHEMA)) == []
    assert {} not in first.values(), "server-side apply makes a null of a map that loses all its fields"
    before = copy.deepcopy(first)
    again = status_of(observation, readable=readable, previous=first, now=NOW + timedelta(minutes=1))
    assert again == first == before
    if condition(first, Type.READY)["status"] == "True":
        assert observation.router_ready
        assert any(p.serving for p in observation.pods)
