"""The sampler as a whole: greedy, drawn, reproducible, independent of the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from forebay_engine.sampling import batch  # noqa: E402
from forebay_engine.sampling.sampler import _sample_on_device, sample, score  # noqa: E402
from forebay_engine.types import SampleSpec, SamplingParams  # noqa: E402

pytestmark = pytest.mark.model

VOCAB = 50


def row(seed: int, vocab: int = VOCAB) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(scale=2.0, size=(1, vocab)).astype(np.float32))


def one(logits: Any, output: list[int] | None = None, **params: Any) -> Any:
    return sample(logits, [SampleSpec(SamplingParams(**params), [1, 2], output or [])])[0]


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5, 500]),
        "top_p": st.sampled_from([0.05, 0.8, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "choice": st.integers(0, 3),
        "min_tokens": st.sampled_from([0, 4]),
        "stop_token_ids": st.sampled_from([(), (3, 7)]),
        "repetition_penalty": st.sampled_from([1.0, 1.2]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)
CASE = st.tuples(st.integers(0, 1000), PARAMS, st.lists(st.integers(0, VOCAB - 1), max_size=6))


@settings(max_examples=150, deadline=None)
@given(st.lists(CASE, min_size=1, max_size=6), st.sampled_from([0, 1, 2]))
def test_a_gpu_draws_as_a_cpu_does(cases: list[Any], ties: int) -> None:
    """The tensor operations that a GPU runs, on CPU tensors, some rows at a time; `ties` rounds logits so that many
    are equal."""
    logits = torch.cat([row(seed) for seed, _, _ in cases])
    if ties:
        logits = (logits * ties).round() / ties
    specs = [SampleSpec(SamplingParams(**params), [1, 2, 2], output) for _, params, output in cases]
    before = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "ROWS", 4)
        assert _sample_on_device(logits, specs) == sample(logits, specs)
    assert torch.equal(logits, before)


@settings(max_examples=60, deadline=None)
@given(st.lists(CASE, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_rows_token_does_not_depend_on_the_batch(cases: list[Any], rng: Any) -> None:
    logits = torch.cat([row(seed) for seed, _, _ in cases])
    specs = [SampleSpec(SamplingParams(**params), [1, 2], output) for _, params, output in cases]
    before = logits.clone()
    together = sample(logits, specs)
    assert torch.equal(logits, before)
    assert together == [sample(logits[i : i + 1], [spec])[0] for i, spec in enumerate(specs)]
    order = list(range(len(cases)))
    rng.shuffle(order)
    assert [together[i] for i in order] == sample(logits[order], [specs[i] for i in order])


@settings(max_examples=60, deadline=None)
@given(CASE)
def test_no_stop_id_before_min_tokens(case: Any) -> None:
    seed, params, output = case
    token = one(row(seed), output, **params).token_id
    if len(output) < params["min_tokens"]:
        assert token not in params["stop_token_ids"]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 30]] = 1.0
    assert one(logits, temperature=0.0).token_id == 9
    assert one(logits, temperature=0.0, logprobs=2).token_id == 9
    assert [i for i, _ in one(logits, temperature=0.0, logprobs=3).logprob.top] == [9, 30, 0]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}])
@pytest.mark.parametrize("seed", range(5))
def test_narrowest_filters_are_greedy(narrow: dict[str, Any], seed: int) -> None:
    logits = row(seed)
    assert one(logits, seed=seed, **{"temperature": 1.0, **narrow}).token_id == one(logits, temperature=0.0).token_id


def test_drawn_tokens_follow_the_distribution() -> None:
    """Chi-squared of 20,000 positions against softmax at the temperature, over the kept ids."""
    logits, temperature, k = row(1, 12), 1.7, 8
    values = logits[0].double().numpy()
    best = np.argsort(-values)[:k]
    weights = np.exp(values[best] / temperature)
    shares = dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))
    counts = dict.fromkeys(shares, 0)
    total = 20_000
    specs = [
        SampleSpec(SamplingParams(temperature=temperature, top_k=k, seed=11), [], [0] * position)
        for position in range(200)
    ]
    for choice in range(total // 200):
        params = SamplingParams(temperature=temperature, top_k=k, seed=11, choice=choice)
        chosen = sample(logits.expand(200, -1), [SampleSpec(params, [], spec.output_ids) for spec in specs])
        for output in chosen:
            counts[output.token_id] += 1
    statistic = sum((counts[i] - total * shares[i]) ** 2 / (total * shares[i]) for i in shares)
    assert statistic < 32  # p = 4e-5 at 7 degrees of freedom


def test_logprobs_are_raw() -> None:
    """Before temperature, penalties, masks and filters."""
    logits = row(4)
    wanted = torch.log_softmax(logits.double(), -1)[0]
    output = one(
        logits,
        [3, 3],
        temperature=0.5,
        top_k=3,
        frequency_penalty=2.0,
        min_tokens=5,
        stop_token_ids=(0,),
        logprobs=4,
        seed=5,
    )
    assert output.logprob.logprob == pytest.approx(float(wanted[output.token_id]), abs=1e-9)
    top = wanted.topk(4)
    assert [i for i, _ in output.logprob.top] == top.indices.tolist()
    assert [v for _, v in output.logprob.top] == pytest.approx(top.values.tolist(), abs=1e-9)
    assert one(logits, logprobs=0).logprob.top == []
    assert one(logits).logprob is None


def test_score_of_extreme_logits_is_finite() -> None:
    entry = score(np.array([-1e4, 1e4, 0.0]), 0, 3)
    assert entry.logprob == -2e4
    assert all(math.isfinite(value) for _, value in entry.top)


def test_rows_and_specs_must_pair_up() -> None:
    with pytest.raises(ValueError, match="2 sequences from 1 rows"):
        sample(row(0), [SampleSpec(SamplingParams(), [], [])] * 2)
