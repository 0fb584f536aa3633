"""What of a status is written, and which fields stay that nobody wants."""

from __future__ import annotations

from typing import Any

import pytest

from forebay_operator.status.fields import filled, unwanted


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"a": 0, "b": "", "c": []}, {"a": 0, "b": "", "c": []}),
        ({"a": {}, "b": {"c": {}}}, {}),
        ({"a": {"b": {}, "c": 1}}, {"a": {"c": 1}}),
    ],
)
def test_maps_that_hold_nothing_are_not_written(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert filled(fields) == expected


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ({"a": 1, "c": [1, 2]}, {"a": 1, "b": 3, "c": [1, 2]}, []),
        ({"a": 1, "c": [1, 2]}, {"a": 2, "c": [1]}, ["a", "c"]),
        ({"b": 1, "a": 1}, {}, ["a", "b"]),
        ({"decision": {"inputs": {"bar": 1, "old": 2}}}, {"decision": {"inputs": {"bar": 1}}}, ["decision.inputs.old"]),
        ({"decision": {"inputs": {"bar": 1}}}, {"decision": {"to": "1:3"}}, ["decision.inputs"]),
        ({"decision": {"inputs": {"bar": 1}}}, {"decision": "none"}, ["decision"]),
    ],
)
def test_what_stays_is_named_where_it_lies(held: dict[str, Any], wanted: dict[str, Any], expected: list[str]) -> None:
    assert unwanted(held, wanted) == expected
