"""Which pods of a Prometheus are a model's: all of its own, whatever its name's length, and nobody else's."""

from __future__ import annotations

import re

import pytest

from forebay_operator.build.names import child_name, router_name
from forebay_operator.observe.prometheus_samples import router_pods, worker_pods

LONGEST = 63


def pods(deployment: str) -> list[str]:
    """As Kubernetes names them (k8s.io/apiserver/pkg/storage/names): cut to 58, and five characters more."""
    return [f"{f'{deployment}-{hashed}-'[:58]}x7k2p" for hashed in ("6d5f9c7b8", "75675f5897")]


def routers(model: str) -> list[str]:
    return pods(router_name(model))


def workers(model: str) -> list[str]:
    found = [pods(child_name(model, pool, "0a1b2c3d")) for pool in ("prefill", "decode")]
    return [name for names in found for name in names]


@pytest.mark.parametrize("length", range(1, LONGEST + 1))
def test_of_names_of_any_length(length: int) -> None:
    model = "m" * length
    for name in routers(model):
        assert re.fullmatch(router_pods(model), name), name
        assert not re.fullmatch(worker_pods(model), name), name
    for name in workers(model):
        assert re.fullmatch(worker_pods(model), name), name
        assert not re.fullmatch(router_pods(model), name), name


@pytest.mark.parametrize("model", ["a", "assistant"])
@pytest.mark.parametrize("more", ["router", "prefill", "decode", "router-b", "b", "decode-0"])
def test_a_model_whose_name_begins_with_anothers(model: str, more: str) -> None:
    theirs = f"{model}-{more}"
    for name in (*routers(theirs), *workers(theirs)):
        assert not re.fullmatch(router_pods(model), name), name
        assert not re.fullmatch(worker_pods(model), name), name
