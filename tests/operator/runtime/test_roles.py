"""Role labels from serving targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.act.roles import RoleChange, role_changes
from forebay_operator.api.labels import Pool
from forebay_operator.observe.types import NodeView, Observation, PodView
from forebay_wire.load import LoadReport


def pod(name: str, pool: Pool, role: Pool | None = None, running: int = 0, **values: object) -> PodView:
    view = PodView(name, pool, "r1", uid=name, role=role, ready=True, load=LoadReport("e", 1, running=running))
    return replace(view, **values)  # type: ignore[arg-type]


def changes(
    *pods: PodView, prefill: int, decode: int, switching: bool = True, nodes: tuple[NodeView, ...] = ()
) -> dict[str, Pool]:
    found = role_changes(Observation(1, pods, nodes=nodes), {"prefill": prefill, "decode": decode}, switching=switching)
    return {change.pod: change.role for change in found}


def test_new_workers_get_their_homes() -> None:
    pods = [pod("p1", "prefill"), pod("d1", "decode"), pod("d2", "decode")]
    assert changes(*pods, prefill=1, decode=2) == {"p1": "prefill", "d1": "decode", "d2": "decode"}


def test_the_replacement_of_one_on_loan_takes_over_its_role() -> None:
    pods = [pod("p1", "prefill", "prefill"), pod("p2", "prefill"), pod("d1", "decode", "decode")]
    assert changes(*pods, prefill=1, decode=2) == {"p2": "decode"}


@pytest.mark.parametrize(
    "values",
    [{"ready": False}, {"terminating": True}, {"draining": True}],
    ids=["not ready", "terminating", "draining"],
)
def test_who_does_not_serve_gets_no_role(values: dict[str, object]) -> None:
    assert changes(pod("p1", "prefill", **values), prefill=1, decode=1) == {}


def test_a_switch_takes_the_least_loaded() -> None:
    pods = [
        pod("p1", "prefill", "prefill"),
        pod("d1", "decode", "decode", 9),
        pod("d2", "decode", "decode", 2),
        pod("d3", "decode", "decode", 5),
    ]
    assert changes(*pods, prefill=2, decode=2) == {"d2": "prefill"}
    assert changes(*pods, prefill=3, decode=1) == {"d2": "prefill", "d3": "prefill"}
    assert changes(*pods, prefill=2, decode=2, switching=False) == {}


def test_a_missing_worker_is_no_reason_to_switch() -> None:
    pods = [pod("p1", "prefill", "prefill"), pod("d1", "decode", "decode"), pod("d2", "decode", "decode")]
    assert changes(*pods, prefill=2, decode=2) == {}


def test_a_cordoned_nodes_role_is_restored_elsewhere() -> None:
    node = NodeView("n1", {}, cordoned=True)
    pods = [
        pod("p1", "prefill", "prefill", node="n1"),
        pod("d1", "decode", "decode", 3, node="n2"),
        pod("d2", "decode", "decode", 1, node="n2"),
    ]
    assert changes(*pods, prefill=1, decode=2, nodes=(node,)) == {"d2": "prefill"}
    assert changes(*pods[:2], prefill=1, decode=1, nodes=(node,)) == {}, "the last one of a role stays in it"


def test_the_workers_that_stay_keep_the_proportion() -> None:
    """Of 4:4 three prefill workers are on a node that is emptied: the five others are split 2:3 meanwhile."""
    node = NodeView("n1", {}, cordoned=True)
    leaving = [pod(f"p{i}", "prefill", "prefill", node="n1") for i in range(3)]
    staying = [pod("p3", "prefill", "prefill", node="n2")]
    staying += [pod(f"d{i}", "decode", "decode", i, node="n2") for i in range(4)]
    assert changes(*leaving, *staying, prefill=4, decode=4, nodes=(node,)) == {"d0": "prefill"}
    switched = [replace(p, role="prefill") if p.name == "d0" else p for p in staying]
    assert changes(*leaving, *switched, prefill=4, decode=4, nodes=(node,)) == {}, "and that is all"
    replaced = [*switched, *(pod(f"r{i}", "prefill", node="n3", created_unix=i) for i in range(3))]
    assert changes(*replaced, prefill=4, decode=4, nodes=(node,)) == {
        "r0": "prefill",
        "r1": "prefill",
        "r2": "decode",
    }, "the replacements fill both roles up, so that nothing has to switch back"


@given(
    roles=st.lists(st.tuples(st.sampled_from(["prefill", "decode"]), st.sampled_from(["prefill", "decode", None]),
                             st.integers(0, 9)), min_size=2, max_size=9),
    share=st.integers(1, 8),
)  # fmt: skip
def test_reaches_any_target_and_then_rests(roles: list[tuple[Pool, Pool | None, int]], share: int) -> None:
    pods = {f"w{i}": pod(f"w{i}", home, role, load) for i, (home, role, load) in enumerate(roles)}
    targets: dict[Pool, int] = {"prefill": min(share, len(pods) - 1)}
    targets["decode"] = len(pods) - targets["prefill"]
    for _ in range(4):
        found: tuple[RoleChange, ...] = role_changes(Observation(1, tuple(pods.values())), targets, switching=True)
        for change in found:
            pods[change.pod] = replace(pods[change.pod], role=change.role)
    assert found == ()
    for role in targets:
        assert sum(p.role == role for p in pods.values()) == targets[role]
