"""The router's command line: what is left unsaid means the same to the router as to the API."""

from __future__ import annotations

import math
from typing import Any

import pytest

from forebay_operator.build.router import UNSAID, router_args
from forebay_router.main import parse_args
from support.manifests import make_model


def flags(changes: dict[str, Any]) -> set[str]:
    return {arg.partition("=")[0] for arg in router_args(make_model(changes), "File")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, set()),
        ({"router.convertible": "Overflow", "drain.timeoutSeconds": 600}, set()),
        ({"router.convertible": "Never"}, {"--convertible"}),
        ({"router.fallback": "Refuse"}, {"--fallback"}),
        ({"objectives.timePerOutputTokenMilliseconds": 40}, {"--tpot-ms"}),
        ({"objectives.timeToFirstTokenMilliseconds": 5}, {"--ttft-ms"}),
        ({"objectives.timeToFirstTokenMilliseconds": 0}, {"--ttft-ms"}),
        ({"drain.timeoutSeconds": 60}, {"--drain-timeout-seconds"}),
    ],
)
def test_only_what_differs_from_the_defaults_is_said(changes: dict[str, Any], said: set[str]) -> None:
    assert flags(changes) & UNSAID.keys() == said


@pytest.mark.parametrize("convertible", ["Never", "Overflow", "Always"])
@pytest.mark.parametrize("fallback", ["BothPhases", "Refuse"])
@pytest.mark.parametrize("milliseconds", [0, 1, 40, 100, 1000])
@pytest.mark.parametrize("drain", [60, 600])
def test_the_router_hears_what_the_spec_says(convertible: str, fallback: str, milliseconds: int, drain: int) -> None:
    model = make_model(
        {
            "router.convertible": convertible,
            "router.fallback": fallback,
            "objectives.timeToFirstTokenMilliseconds": milliseconds,
            "objectives.timePerOutputTokenMilliseconds": milliseconds,
            "drain.timeoutSeconds": drain,
        }
    )
    args = [arg for arg in router_args(model, "Kubernetes") if not arg.endswith(")")]
    heard = parse_args([*args, "--kubernetes-namespace=llm"])
    assert heard.convertible == convertible.lower()
    assert heard.both_phases is (fallback == "BothPhases")
    assert heard.ttft_objective == heard.tpot_objective == (milliseconds / 1000 or math.inf)
    assert heard.drain_timeout == drain
    assert heard.refusal_factor == 0.0
