"""The log of prompts that a worker's load streams tell of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.server.prefixes import PrefixLog
from forebay_wire.prefix import PrefixEntry


def prompt(number: int, size: int = 1) -> list[PrefixEntry]:
    return [PrefixEntry(1000 * number + i, i) for i in range(size)]


def test_a_reader_gets_each_prompt_once() -> None:
    log = PrefixLog()
    log.add(prompt(1))
    found, cursor = log.since(0)
    assert found == [prompt(1)]
    assert log.since(cursor) == ([], cursor)
    log.add(prompt(2))
    log.add([])
    assert log.since(cursor)[0] == [prompt(2)]


def test_a_late_reader_gets_what_is_left() -> None:
    log = PrefixLog(max_entries=4)
    for number in range(10):
        log.add(prompt(number, 2))
    found, cursor = log.since(3)
    assert found == [prompt(8, 2), prompt(9, 2)]
    assert log.since(cursor)[0] == []


def test_a_prompt_over_the_line_s_size_is_still_told() -> None:
    log = PrefixLog()
    log.add(prompt(1, 20))
    assert log.since(0, max_entries=5)[0] == [prompt(1, 20)]


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(9, 40), st.integers(1, 20))
def test_lines_are_bounded_and_in_order(sizes: list[int], held: int, line: int) -> None:
    log = PrefixLog(max_entries=held)
    got: list[list[PrefixEntry]] = []
    cursor = 0
    for number, size in enumerate(sizes):
        log.add(prompt(number, size))
        found, cursor = log.since(cursor, line)
        assert len(found) <= 1 or sum(map(len, found)) <= line
        got += found
    while found := log.since(cursor, line)[0]:
        got += found
        cursor = log.since(cursor, line)[1]
    firsts = [entries[0].key for entries in got]
    assert firsts == sorted(set(firsts))
    if sum(sizes) <= held:
        assert [len(entries) for entries in got] == sizes
