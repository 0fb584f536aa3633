"""Stop strings: what is shown, what is held back, wherever the text was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.text.stops import StopWindow


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Text before the match that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    window = StopWindow(stops)
    shown = ""
    for piece in pieces:
        text, found = window.push(piece)
        shown += text
        if found:
            return shown, True
        assert window.held == "" or any(stop.startswith(window.held) and stop != window.held for stop in stops)
    return shown + window.flush(), False


few = st.text(alphabet="ab\u00e9", max_size=24)


@given(
    text=few,
    stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_any_cut_gives_the_text_before_the_first_match(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert run(pieces, stops) == reference(text, stops)


@given(text=few, stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4))
def test_shows_a_character_as_soon_as_it_cannot_begin_a_match(text: str, stops: list[str]) -> None:
    window = StopWindow(stops)
    seen = ""
    for character in text:
        _, found = window.push(character)
        if found:
            return
        seen += character
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(window.held) == longest


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", " wor", "ld"], [" world"], ("Hello", True)),
        (["a", "b", "c"], ["abc", "b"], ("a", True)),
        (["aab"], ["ab"], ("a", True)),
        (["aaaa"], ["aab"], ("aaaa", False)),
        (["\n", "\nUser"], ["\n\nUser:"], ("\n\nUser", False)),
        (["x"], [], ("x", False)),
    ],
)
def test_table(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert run(pieces, stops) == expected


def test_a_match_before_min_tokens_passes_and_one_completed_after_counts() -> None:
    window = StopWindow(["END"])
    assert window.push("xEND", armed=False) == ("xEND", False)
    assert window.push("yEN", armed=False) == ("y", False)
    assert window.push("D!", armed=True) == ("", True)
