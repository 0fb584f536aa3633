"""The forecast is the reconciler's own rules: whatever the cluster looks like, it ends where they end."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.act.growth import PoolGoal, Rules
from forebay_operator.act.operation import Cause, Operation
from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.observe.types import DeploymentView, Observation, PodView
from forebay_operator.preview.forecast import Fate, Forecast, forecast
from forebay_wire.load import LoadReport

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pod(name: str, pool: Pool, revision: str, *, running: int = 0, ready: bool = True, going: bool = False) -> PodView:
    load = LoadReport("e", 1, ready=True, running=running)
    return PodView(name, pool, revision, uid=f"u-{name}", role=pool, node=f"node-{name}", phase="Running", ready=ready,
                   terminating=going, load=load, load_age_seconds=0.1)  # fmt: skip


def deployment(pool: Pool, revision: str, replicas: int) -> DeploymentView:
    return DeploymentView(f"m-{pool}-{revision}", pool, revision, replicas)


def goals(prefill: int, decode: int, revision: str = "r1") -> dict[Pool, PoolGoal]:
    counts: dict[Pool, int] = {"prefill": prefill, "decode": decode}
    return {pool: PoolGoal(counts[pool], f"m-{pool}-{revision}") for pool in POOLS}


def settled(prefill: int, decode: int, running: int = 0) -> Observation:
    pods = [pod(f"p{i}", "prefill", "r1", running=running + i) for i in range(prefill)]
    pods += [pod(f"d{i}", "decode", "r1", running=running + i) for i in range(decode)]
    return Observation(1, tuple(pods), (deployment("prefill", "r1", prefill), deployment("decode", "r1", decode)))


def look(seen: Observation, wanted: dict[Pool, PoolGoal], operation: Operation | None = None, surge: int = 0,
         targets: dict[Pool, int] | None = None) -> Forecast:  # fmt: skip
    counts = targets or {pool: goal.replicas for pool, goal in wanted.items()}
    return forecast(seen, wanted, operation, counts, Rules(timedelta(minutes=10), 1, surge), NOW, switching=True)


def fates(made: Forecast) -> dict[str, list[str]]:
    return {fate.value: [p.name for p in made.pods if p.fate is fate] for fate in Fate}


def test_nothing_to_do_is_no_step() -> None:
    made = look(settled(1, 2), goals(1, 2))
    assert made.steps == ()
    assert fates(made) == {"Kept": ["p0", "d0", "d1"], "Added": [], "Drained": [], "Leaving": []}


def test_the_idlest_is_drained() -> None:
    made = look(settled(1, 3), goals(1, 2))
    assert fates(made)["Drained"] == ["d0"]
    assert [(p.node, p.why) for p in made.pods if p.fate is Fate.DRAINED] == [("node-d0", "ScaleIn")]
    assert made.steps == ("drain d0 of m-decode-r1 (ScaleIn)",)


def test_a_first_start_adds_all() -> None:
    made = look(Observation(1), goals(1, 2))
    assert fates(made)["Added"] == ["", "", ""]
    assert made.replicas == {"m-prefill-r1": 1, "m-decode-r1": 2}
    assert [p.becomes for p in made.pods] == ["prefill", "decode", "decode"]


@pytest.mark.parametrize("surge", [0, 1])
def test_a_rollout_replaces_one_at_a_time(surge: int) -> None:
    made = look(settled(1, 2), goals(1, 2, "r2"), surge=surge)
    assert len(fates(made)["Drained"]) == len(fates(made)["Added"]) == 3
    assert made.replicas == {"m-prefill-r2": 1, "m-decode-r2": 2}
    first = made.steps[0].split()[0]
    assert first == ("add" if surge else "drain"), made.steps
    assert made.steps[-1] in ("remove m-prefill-r1", "remove m-decode-r1")


def test_a_role_switch_keeps_the_pod() -> None:
    made = look(settled(2, 2), goals(2, 2), targets={"prefill": 1, "decode": 3})
    assert [(p.name, p.role, p.becomes) for p in made.pods if p.role != p.becomes] == [("p0", "prefill", "decode")]


def test_what_was_under_way_goes_on() -> None:
    seen = settled(1, 3)
    recorded = Operation(Cause.SCALE_IN, "decode", "m-decode-r1", 2, "d2", "u-d2", NOW, NOW + timedelta(minutes=5))
    assert fates(look(seen, goals(1, 2), recorded))["Drained"] == ["d2"], "not the idlest: this one is being drained"
    assert fates(look(seen, goals(1, 3), recorded))["Drained"] == [], "it is wanted again"


counts = st.integers(1, 4)


@given(
    st.tuples(counts, counts),
    st.tuples(counts, counts),
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=8, max_size=8),
)
def test_it_always_ends_at_the_goals(
    have: tuple[int, int], want: tuple[int, int], roll: bool, surge: int, odd: list[tuple[bool, bool, int]]
) -> None:
    pods = []
    for pool, count in zip(POOLS, have, strict=True):
        for index in range(count):
            ready, going, running = odd[len(pods)]
            pods.append(pod(f"{pool[0]}{index}", pool, "r1", ready=ready, going=going, running=running))
    seen = Observation(1, tuple(pods), tuple(deployment(p, "r1", n) for p, n in zip(POOLS, have, strict=True)))
    wanted = goals(*want, "r2" if roll else "r1")
    made = look(seen, wanted, surge=surge)
    assert made.waiting == ""
    assert made.replicas == {goal.deployment: goal.replicas for goal in wanted.values()}
    staying = [p for p in made.pods if p.fate in (Fate.KEPT, Fate.ADDED)]
    assert len(staying) == sum(want)
    roles = [p.becomes for p in staying]
    assert {pool: roles.count(pool) for pool in POOLS} == dict(zip(POOLS, want, strict=True))
