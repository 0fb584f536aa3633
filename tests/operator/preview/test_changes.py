"""What a plan calls a change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_operator.preview.apply import last_applied, merge_patch, merged
from forebay_operator.preview.changes import differences

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"spec": {"a": 1}}, {"spec": {"a": 2}}, ("spec.a: 1 -> 2",)),
        ({"spec": {"a": 1}}, {"spec": {}}, ("spec.a: 1 -> (none)",)),
        ({"spec": {}}, {"spec": {"a": {"b": 1}}}, ('spec.a: (none) -> {"b": 1}',)),
        ({"status": {"a": 1}}, {"status": {"a": 2}}, ()),
        ({"metadata": {"resourceVersion": "1", "uid": "u"}}, {"metadata": {"resourceVersion": "2"}}, ()),
        ({"metadata": {"labels": {"a": "b"}}}, {"metadata": {"labels": {}}}, ('metadata.labels.a: "b" -> (none)',)),
        (
            {"c": [{"name": "x", "i": 1}, {"name": "y", "i": 1}]},
            {"c": [{"name": "y", "i": 2}, {"name": "x", "i": 1}]},
            ("c[y].i: 1 -> 2",),
        ),
        ({"c": ["a", "b"]}, {"c": ["a", "c"]}, ('c[1]: "b" -> "c"',)),
        ({"c": ["a"]}, {"c": ["a", "b"]}, ('c: ["a"] -> ["a", "b"]',)),
        (
            {"kind": "Secret", "data": {"token": "b2xk"}},
            {"kind": "Secret", "data": {"token": "bmV3"}},
            ("data.token: (changed)",),
        ),
    ],
)
def test_differences(before: Object, after: Object, expected: tuple[str, ...]) -> None:
    assert differences(before, after) == expected


def test_what_an_intent_leaves_out_is_no_difference() -> None:
    live = {"spec": {"a": 1, "defaulted": True, "c": [{"name": "x", "i": 1, "pulled": "Always"}]}}
    assert differences(live, {"spec": {"a": 1, "c": [{"name": "x", "i": 1}]}}, partial=True) == ()
    assert differences(live, {"spec": {"a": 2}}, partial=True) == ("spec.a: 1 -> 2",)


def test_a_long_list_is_cut() -> None:
    made = differences({str(i): i for i in range(99)}, {})
    assert len(made) == 51
    assert made[-1] == "and 49 more"


json_values = st.recursive(
    st.integers() | st.text(max_size=4) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4)


@given(objects, objects)
def test_there_is_a_difference_exactly_when_they_differ(one: Object, other: Object) -> None:
    assert (differences(one, other) == ()) == (one == other)


@given(objects, objects)
def test_a_merge_patch_brings_one_to_the_other(one: Object, other: Object) -> None:
    assert merged(one, merge_patch(one, other)) == other


def test_last_applied_is_read_with_care() -> None:
    key = "kubectl.kubernetes.io/last-applied-configuration"
    assert last_applied({"metadata": {}}) == {}
    assert last_applied({"metadata": {"annotations": {key: "not json"}}}) == {}
    assert last_applied({"metadata": {"annotations": {key: "[]"}}}) == {}
    assert last_applied({"metadata": {"annotations": {key: '{"spec": {"a": 1}}'}}}) == {"spec": {"a": 1}}
