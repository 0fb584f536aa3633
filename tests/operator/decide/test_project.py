"""Projection onto bounds, ratio and budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.api.ratio import Ratio
from forebay_operator.decide import Bounds, Split
from forebay_operator.decide.project import RatioInfeasible, broken, feasible, project


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    pairs = [sorted((draw(st.integers(1, 12)), draw(st.integers(1, 12)))) for _ in range(2)]
    ratios = sorted(
        (Ratio(draw(st.integers(1, 6)), draw(st.integers(1, 6))) for _ in range(2)), key=lambda r: r.prefill / r.decode
    )
    return Bounds(
        pairs[0][0],
        pairs[0][1],
        pairs[1][0],
        pairs[1][1],
        draw(st.sampled_from([None, ratios[0]])),
        draw(st.sampled_from([None, ratios[1]])),
        draw(st.sampled_from([None, *range(2, 40, 3)])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )


@given(bounds(), st.integers(1, 15), st.integers(1, 15))
def test_what_is_projected_breaks_nothing_keeps_the_total_and_is_nearest(limits: Bounds, p: int, d: int) -> None:
    wanted = Split(p, d)
    if not feasible(limits, wanted.total):
        with pytest.raises(RatioInfeasible) as caught:
            project(limits, wanted)
        nearest = caught.value.nearest
        assert nearest is None or not {"Bounds", "Budget"} & set(broken(limits, nearest))
        return
    projection = project(limits, wanted)
    split = projection.split
    assert split.total == wanted.total
    assert not broken(limits, split)
    assert (split == wanted) == (not broken(limits, wanted)) == (not projection.limited_by)
    away = abs(split.prefill - p)
    assert all(abs(other.prefill - p) >= away for other in feasible(limits, wanted.total))


@given(bounds(), st.integers(1, 15), st.integers(1, 15))
def test_projection_is_idempotent_and_keeps_order(limits: Bounds, p: int, d: int) -> None:
    try:
        first = project(limits, Split(p, d)).split
        more = project(limits, Split(p + 1, d - 1)).split if d > 1 else first
    except RatioInfeasible:
        return
    assert project(limits, first).split == first
    assert more.prefill >= first.prefill


def test_infeasible_says_the_limits_and_the_nearest() -> None:
    limits = Bounds(ratio_min=Ratio(2, 1), ratio_max=Ratio(2, 1))
    with pytest.raises(RatioInfeasible) as caught:
        project(limits, Split(4, 4))
    assert caught.value.nearest == Split(5, 3)
    assert "no split of 8 workers satisfies" in str(caught.value)
    assert "ratio 2:1-2:1" in str(caught.value)
    with pytest.raises(RatioInfeasible, match="change the bounds") as caught:
        project(Bounds(prefill_min=6, decode_min=6), Split(4, 4))
    assert caught.value.nearest is None


def test_the_budget_counts_each_pools_gpus() -> None:
    limits = Bounds(max_gpus=20, prefill_gpus=4, decode_gpus=2)
    assert feasible(limits, 8) == [Split(1, 7), Split(2, 6)]
    assert project(limits, Split(4, 4)).limited_by == ("Budget",)
