"""Which workers the law sees, where there are more or fewer than there are to be."""

from __future__ import annotations

import pytest

from forebay_operator.api.labels import POOLS, Pool
from forebay_operator.observe.fleet import Fleet, fleet_of
from forebay_operator.observe.types import Observation, PodView


def pods(pool: Pool, count: int, role: Pool | None = None, **changes: bool) -> list[PodView]:
    values = {"ready": True, **changes}
    return [
        PodView(f"m-{pool}-{role or pool}-{i}", pool, "r", role=role or pool, ip="10.0.0.1", phase="Running", **values)
        for i in range(count)
    ]


def fleet(seen: list[PodView], prefill: int, decode: int) -> Fleet:
    return fleet_of(Observation(1, pods=tuple(seen)), (), {"prefill": prefill, "decode": decode})


def roles(found: Fleet) -> tuple[int, ...]:
    return tuple(sum(member.target == pool for member in found.members) for pool in POOLS)


@pytest.mark.parametrize("prefill", [8, 7, 6, 5, 4])
@pytest.mark.parametrize("decode", [8, 7, 6, 5, 4])
def test_while_pools_shrink_the_split_that_is_meant_is_seen(prefill: int, decode: int) -> None:
    found = fleet([*pods("prefill", prefill), *pods("decode", decode)], 4, 4)
    assert roles(found) == (4, 4)
    assert all(member.there for member in found.members)


@pytest.mark.parametrize(
    ("seen", "targets", "split"),
    [
        ([*pods("prefill", 4), *pods("decode", 4)], (3, 5), (4, 4)),
        ([*pods("prefill", 2), *pods("decode", 8)], (4, 4), (2, 6)),
        ([*pods("prefill", 8), *pods("decode", 8, "prefill")], (4, 4), (8, 0)),
        ([*pods("prefill", 2), *pods("prefill", 2, "decode"), *pods("decode", 4)], (2, 4), (2, 4)),
        ([*pods("prefill", 4, draining=True), *pods("prefill", 4), *pods("decode", 4)], (4, 4), (4, 4)),
    ],
    ids=["roles switch", "one is short", "none has it", "on loan", "draining"],
)
def test_others_fill_up_a_role_that_lacks_some(
    seen: list[PodView], targets: tuple[int, int], split: tuple[int, int]
) -> None:
    found = fleet(seen, *targets)
    assert roles(found) == split
    assert found == fleet(seen[::-1], *targets), "whatever the order of what was seen"
    assert all(member.serving and member.there for member in found.members)


def test_who_serves_comes_first_within_a_role() -> None:
    found = fleet([*pods("prefill", 1), *pods("decode", 2, ready=False), *pods("decode", 2, "prefill")], 2, 1)
    assert [member.serving for member in found.members if member.target == "prefill"] == [True, True]
    assert roles(found) == (2, 1)


def test_one_that_is_missing_is_a_member_in_the_role_that_lacks_it() -> None:
    found = fleet([*pods("prefill", 1), *pods("decode", 3)], 3, 3)
    assert roles(found) == (3, 3)
    assert [(m.name, m.target) for m in found.members if not m.there] == [
        ("(missing 1)", "prefill"),
        ("(missing 2)", "prefill"),
    ]
