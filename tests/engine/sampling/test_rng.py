"""The counter-based generator: pure, well spread, and the same for ever (a stream may go on on a newer worker)."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forebay_engine.sampling.rng import uniform

INTEGERS = st.integers(min_value=-(2**70), max_value=2**70)


@given(INTEGERS, INTEGERS, INTEGERS)
def test_inside_the_open_interval(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert 0.0 < value < 1.0
    assert value == uniform(seed, choice, position)


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 100_000))
def test_every_argument_counts(seed: int, choice: int, position: int) -> None:
    value = uniform(seed, choice, position)
    assert value != uniform(seed ^ 1, choice, position)
    assert value != uniform(seed, choice + 1, position)
    assert value != uniform(seed, choice, position + 1)
    if choice != position:
        assert value != uniform(seed, position, choice)


def test_known_values_do_not_change() -> None:
    assert [uniform(*args) for args in KNOWN] == list(KNOWN.values())


KNOWN: dict[tuple[int, int, int], float] = {
    (0, 0, 0): 0.13870941014555427,
    (42, 0, 0): 0.3869742762400409,
    (42, 0, 1): 0.7129353372857995,
    (42, 1, 0): 0.577125795355946,
    (18446744073709551615, 3, 100): 0.8399469953347231,
    (-1, 3, 100): 0.8399469953347231,
}


def test_neighbouring_counters_are_uniform_and_unrelated() -> None:
    """Chi-squared over 64 bins, and correlation of neighbours, for the counters that requests really use."""
    for draw in (lambda i: uniform(1, 0, i), lambda i: uniform(i, 0, 0), lambda i: uniform(7, i, 3)):
        values = [draw(i) for i in range(20_000)]
        bins = [0] * 64
        for value in values:
            bins[int(value * 64)] += 1
        expected = len(values) / 64
        assert sum((n - expected) ** 2 / expected for n in bins) < 120  # p = 2e-5 at 63 degrees of freedom
        assert abs(sum((a - 0.5) * (b - 0.5) for a, b in pairwise(values)) / len(values)) < 0.003
