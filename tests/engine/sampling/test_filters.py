"""Each filter and penalty against a plain, slow definition of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_engine.sampling.filters import adjust, best, is_adjusted, kept
from forebay_engine.types import SampleSpec, SamplingParams

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 3.5]), min_size=1, max_size=40)


def ranked(values: list[float]) -> list[int]:
    """Ids, likeliest first, equal ones by id."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def kept_ids(logits: list[float], **params: Any) -> list[int]:
    ids, weights = kept(np.array(logits), SamplingParams(**{"temperature": 1.0, **params}))
    assert len(ids) == len(weights)
    assert list(ids) == sorted(set(ids.tolist()))
    return [int(i) for i in ids]


@given(LOGITS, st.integers(1, 45))
def test_best_is_the_sorted_head(logits: list[float], count: int) -> None:
    assert best(np.array(logits), count).tolist() == ranked(logits)[:count]


@given(LOGITS, st.integers(0, 45))
def test_top_k(logits: list[float], k: int) -> None:
    assert kept_ids(logits, top_k=k) == sorted(ranked(logits)[: k or None])


@given(LOGITS, st.floats(0.0, 1.0), st.floats(0.2, 3.0))
def test_min_p(logits: list[float], min_p: float, temperature: float) -> None:
    top = max(logits)
    shares = [math.exp((x - top) / temperature) for x in logits]
    wanted = {i for i, share in enumerate(shares) if min_p == 0.0 or share >= min_p}
    found = set(kept_ids(logits, min_p=min_p, temperature=temperature))
    # Only a share that is min_p up to rounding may fall to either side.
    assert all(math.isclose(shares[i], min_p, rel_tol=1e-12) for i in found ^ wanted)


@given(LOGITS, st.floats(0.0, 1.0, exclude_min=True), st.integers(0, 45))
def test_top_p_is_the_smallest_set_that_reaches_it(logits: list[float], top_p: float, k: int) -> None:
    order = ranked(logits)[: k or None]
    weights = [math.exp(logits[i] - max(logits)) for i in order]
    total = sum(weights)
    found = kept_ids(logits, top_p=top_p, top_k=k)
    size = len(found)
    assert found == sorted(order[:size])
    assert sum(weights[:size]) >= top_p * total * (1 - 1e-12)
    assert size == 1 or sum(weights[: size - 1]) < top_p * total * (1 + 1e-12)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999, 0.9999999])
def test_top_p_over_a_large_vocabulary(top_p: float) -> None:
    """The nucleus is larger than the first candidates looked at; sorting everything gives the same."""
    logits = np.random.default_rng(3).normal(size=50_000)
    order = np.lexsort((np.arange(50_000), -logits))
    shares = np.cumsum(np.exp(logits[order] - logits.max()))
    size = int(np.searchsorted(shares, top_p * shares[-1], side="left")) + 1
    assert kept_ids(logits.tolist(), top_p=top_p) == sorted(order[:size].tolist())


def test_zero_top_p_keeps_the_best() -> None:
    assert kept_ids([0.0, 2.0, 2.0], top_p=0.0) == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    ids, weights = kept(np.array([500.0, -500.0, 499.0]), SamplingParams(temperature=temperature))
    assert np.isfinite(weights).all()
    assert weights[ids.tolist().index(0)] == 1.0


def spec(prompt: list[int], output: list[int], **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), prompt, output)


IDS = st.lists(st.integers(0, 9), max_size=12)


@settings(max_examples=200)
@given(
    st.lists(st.floats(-9, 9), min_size=10, max_size=10),
    IDS,
    IDS,
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 0.5, -1.5]),
    st.sampled_from([0.0, 0.25, -2.0]),
    st.integers(0, 5),
)
def test_penalties(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    min_tokens: int,
) -> None:
    case = spec(
        prompt,
        output,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        min_tokens=min_tokens,
        stop_token_ids=(2, 5),
    )
    row = np.array(logits)
    found = adjust(row, case)
    assert row.tolist() == logits
    for token, before in enumerate(logits):
        wanted = before
        if token in prompt or token in output:
            wanted = wanted / repetition if wanted > 0 else wanted * repetition
        count = output.count(token)
        wanted -= frequency * count + presence * (count > 0)
        if len(output) < min_tokens and token in (2, 5):
            wanted = -math.inf
        assert found[token] == pytest.approx(wanted, abs=1e-12)
    if not is_adjusted(case):
        assert found.tolist() == logits
