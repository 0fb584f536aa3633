"""The home pools as the law may size them, and what local mode does when one changes its size. Pure parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.api.v1alpha1 import DisaggregatedModel
from forebay_operator.decide import Fleet, Rate, Rules, Split
from forebay_operator.homes import (
    PENDING_LEAST_SECONDS,
    PENDING_MOST_SECONDS,
    Homes,
    Limits,
    StartUps,
    growth_of,
    home_limits,
    pending_seconds,
    resized,
)
from forebay_operator.local.containers import Places
from forebay_operator.local.errors import LocalError
from forebay_operator.local.places import Room
from forebay_operator.local.ports import Ports
from forebay_operator.local.roles import WorkerRole
from forebay_operator.local.sizes import leavers, new_role

counts = st.builds(Split, st.integers(1, 9), st.integers(1, 9))


def model(engine: str = "Simulated", **spec: Any) -> DisaggregatedModel:
    bounds = {"minReplicas": 1, "maxReplicas": 4}
    return DisaggregatedModel.model_validate({
        "apiVersion": "serving.forebay.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": "m"},
        "spec": {
            "model": {"servedName": "m", **({"source": "hostpath:///m"} if engine == "Native" else {})},
            "engine": {"type": engine},
            "scaling": {"prefill": bounds, "decode": bounds},
            **spec,
        },
    })  # fmt: skip


def homes(prefill: int, decode: int, of: DisaggregatedModel) -> Homes:
    sizes: dict[Pool, int] = {"prefill": prefill, "decode": decode}
    return Homes({pool: Fleet(n, n) for pool, n in sizes.items()}, home_limits(of.spec, sizes))


@pytest.mark.parametrize(
    ("spec", "options", "limits"),
    [
        ({}, {}, ((1, 4), (1, 4))),
        ({"replicas": 3}, {}, ((1, 1), (2, 2))),
        ({"prefill": {"replicas": 1}, "scaling": {"decode": {"maxReplicas": 3}}}, {}, ((1, 1), (1, 3))),
        ({}, {"yielded": ["decode"]}, ((1, 4), (2, 2))),
        ({}, {"held": ["decode"]}, ((1, 4), (1, 2))),
    ],
    ids=["bounds", "/scale", "one is fixed", "somebody else's", "no place for more"],
)
def test_what_pools_may_have(spec: Any, options: Any, limits: Any) -> None:
    found = home_limits(model(**spec).spec, {"prefill": 1, "decode": 2}, **options)
    assert found == {pool: Limits(*each) for pool, each in zip(POOLS, limits, strict=True)}


def test_the_policy_of_growth_is_the_specs() -> None:
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Percent", "value": 50, "periodSeconds": 30}],
        },
        "scaleDown": {"selectPolicy": "Disabled", "tolerancePercent": 25},
    }
    bounds = {pool: {"minReplicas": 1, "maxReplicas": 4} for pool in POOLS}
    of = model("Native", scaling={**bounds, "maxGPUs": 6, "behavior": behavior})
    found = growth_of(of.spec, homes(1, 2, of), [40.0, 90.0, 60.0])
    assert found is not None
    assert found.up == Rules(0.0, "Max", (Rate("Percent", 50, 30.0),), None)
    assert (found.down.select, found.down.tolerance, found.down.rates) == ("Disabled", 0.25, (Rate("Pods", 1, 60.0),))
    assert (found.start_seconds, found.pending_seconds) == (60.0, PENDING_LEAST_SECONDS)
    assert found.bounds is not None
    assert (found.bounds.max_gpus, found.bounds.decode_gpus, found.bounds.prefill_max) == (6, 1, 4)
    fixed = model(prefill={"replicas": 1}, decode={"replicas": 2}, scaling={})
    assert growth_of(fixed.spec, homes(1, 2, fixed), []) is None


@pytest.mark.parametrize(
    ("starts", "seconds"),
    [
        ([], PENDING_LEAST_SECONDS),
        ([10.0], PENDING_LEAST_SECONDS),
        ([10.0, 400.0, 20.0], 800.0),
        ([9e9], PENDING_MOST_SECONDS),
    ],
)
def test_how_long_a_place_is_waited_for(starts: list[float], seconds: float) -> None:
    assert pending_seconds(starts) == seconds


@given(counts, counts, counts)
def test_role_targets_follow_the_pools(targets: Split, before: Split, after: Split) -> None:
    found = resized(targets, before, after)
    assert found.total == after.total
    assert min(found) >= 1
    if targets == before:
        assert found == after, "without loans roles are homes"


def test_loans_stay_where_they_are() -> None:
    assert resized(Split(1, 5), Split(3, 3), Split(3, 4)) == Split(1, 6)
    assert resized(Split(5, 1), Split(3, 3), Split(3, 2)) == Split(4, 1), "a role keeps one worker"


def test_starts_are_measured_by_the_observers_clock() -> None:
    starts = StartUps()
    assert starts.look({"old": False, "there": True}, 0.0) == []
    assert starts.look({"old": True, "there": True, "new": False}, 10.0) == [], "when the old one began is not known"
    assert starts.look({"old": False, "new": False, "quick": True}, 15.0) == []
    assert starts.look({"old": True, "new": True, "quick": True}, 40.0) == [30.0]
    assert starts.look({"new": False}, 50.0) == []


# Local mode.


def worker(name: str, role: Pool, load: int = 0, ready: bool = True) -> WorkerRole:
    return WorkerRole(name, name.split("-")[0], role, load, ready)


@pytest.mark.parametrize(
    ("workers", "gone"),
    [
        ([worker("decode-0", "decode"), worker("decode-1", "decode")], "decode-1"),
        ([worker("decode-0", "decode", 1), worker("decode-1", "decode", 2)], "decode-0"),
        ([worker("decode-0", "decode"), worker("decode-1", "prefill")], "decode-0"),
        ([worker("decode-0", "decode"), worker("decode-1", "decode", 9, ready=False)], "decode-1"),
        ([worker("decode-9", "decode"), worker("decode-10", "decode"), worker("prefill-0", "decode")], "decode-10"),
    ],
    ids=["the younger", "the idler", "in its pool's role", "not ready", "by number"],
)
def test_who_leaves(workers: list[WorkerRole], gone: str) -> None:
    assert leavers(workers, "decode", 1) == [gone]


@pytest.mark.parametrize(
    ("serving", "target", "home", "role"),
    [
        (Split(1, 1), Split(1, 2), "decode", "decode"),
        (Split(1, 1), Split(2, 1), "decode", "prefill"),
        (Split(1, 1), Split(1, 2), "prefill", "decode"),
        (Split(1, 1), Split(1, 1), "prefill", "prefill"),
    ],
)
def test_what_a_new_worker_serves_as(serving: Split, target: Split, home: Pool, role: Pool) -> None:
    assert new_role(serving, target, home) == role


def test_room_is_given_out_and_taken_back() -> None:
    of = model("Native")
    ports = Ports("127.0.0.1")
    try:
        room = Room(of, Places("127.0.0.1", 1, (), "t", "w"), ports, ("4", "5"), 20000)
        sizes: dict[Pool, int] = {"prefill": 1, "decode": 1}
        assert room.limits(sizes) == {"prefill": Limits(1, 3), "decode": Limits(1, 3)}
        first = room.take("decode", ["prefill-0", "decode-0"])
        second = room.take("decode", ["prefill-0", "decode-0", "decode-1"])
        assert (first.name, second.name) == ("decode-1", "decode-2")
        assert first.port != second.port
        assert [c.env["CUDA_VISIBLE_DEVICES"] for c in (first, second)] == ["4", "5"]
        with pytest.raises(LocalError, match="needs 1 GPUs, and 0 of this machine are free"):
            room.take("prefill", [])
        room.give_back(first)
        again = room.take("prefill", ["prefill-0"])
        assert (again.name, again.port, again.env["CUDA_VISIBLE_DEVICES"]) == ("prefill-1", first.port, "4")
    finally:
        ports.close()


def test_sizes_that_are_ordered_count_as_wanted() -> None:
    of = model()
    held = homes(1, 2, of)
    assert held.ordered(Split(2, 2)).wanted == Split(2, 2)
    assert held.wanted == Split(1, 2)
