"""What is measured gives back the model it came from."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay_engine.perf import load
from forebay_engine.perf.fit import Sample
from forebay_operator.calibrate.measure import steps_of
from forebay_operator.calibrate.points import ANSWER_TOKENS, Limits, decode_points, prefill_lengths
from forebay_operator.calibrate.probe import Timing
from forebay_operator.calibrate.samples import CalibrationError, Handoff, Measured, Worker, fit_model

WORKER = Worker(kv_capacity_tokens=400_000, ttft_objective_seconds=1.0, tpot_objective_seconds=0.04)


def measured_from(name: str) -> Measured:
    """A perfect measurement of a named model, at the points that a calibration would take."""
    truth = load(name)
    limits = Limits(max_model_len=8192, kv_capacity_tokens=truth.kv_capacity_tokens, max_running=64)
    measured = Measured()
    for tokens in prefill_lengths(limits):
        measured.prefill.append(Sample(truth.prefill_seconds(tokens), chunks=((tokens, 0),)))
        size = tokens * truth.kv_bytes_per_token
        measured.handoffs.append(Handoff(size, truth.handoff_seconds(tokens), tokens))
    for point in decode_points(limits):
        resident = point.batch * (point.context + ANSWER_TOKENS // 2)
        seconds = truth.decode_seconds(point.batch, resident)
        measured.decode.append(Sample(seconds, batch=point.batch, resident_tokens=resident))
    return measured


@pytest.mark.parametrize("name", ["slow", "h100-llama-8b", "h100-llama-70b"])
def test_a_perfect_measurement_gives_the_model_back(name: str) -> None:
    truth = load(name)
    fitted = fit_model(measured_from(name), WORKER, name="again", note="")
    for tokens in (100, 1000, 4000):
        assert fitted.model.prefill_seconds(tokens) == pytest.approx(truth.prefill_seconds(tokens), rel=0.1)
        assert fitted.model.handoff_seconds(tokens) == pytest.approx(truth.handoff_seconds(tokens), rel=0.05)
    for batch, context in ((1, 500), (16, 500), (8, 3000)):
        resident = batch * context
        assert fitted.model.decode_seconds(batch, resident) == pytest.approx(
            truth.decode_seconds(batch, resident), rel=0.05
        )
    assert fitted.model.kv_bytes_per_token == pytest.approx(truth.kv_bytes_per_token, rel=0.01)
    assert fitted.decode_error < 0.03
    assert fitted.model.kv_capacity_tokens == WORKER.kv_capacity_tokens


def test_too_few_points_are_refused_with_the_remedy() -> None:
    measured = measured_from("slow")
    measured.decode = measured.decode[:2]
    with pytest.raises(CalibrationError, match="--minutes"):
        fit_model(measured, WORKER, name="x", note="")


def test_without_a_pull_transfer_counts_as_free() -> None:
    measured = measured_from("slow")
    measured.handoffs = []
    assert fit_model(measured, WORKER, name="x", note="").model.handoff_seconds(1000) == 0


@settings(deadline=None)
@given(
    st.builds(
        Limits,
        max_model_len=st.integers(128, 200_000),
        kv_capacity_tokens=st.integers(1024, 10_000_000),
        max_running=st.integers(1, 1024),
    )
)
def test_points_always_fit_the_worker(limits: Limits) -> None:
    lengths = prefill_lengths(limits)
    assert lengths == sorted(set(lengths))
    assert all(0 < n < limits.max_model_len and n <= limits.kv_capacity_tokens for n in lengths)
    points = decode_points(limits)
    assert len(points) == len(set(points))
    for point in points:
        assert point.batch <= limits.max_running
        assert point.context + ANSWER_TOKENS < limits.max_model_len
        assert point.batch * (point.context + ANSWER_TOKENS) < limits.kv_capacity_tokens


def stream(decode: str, first: float, gap: float, tokens: int = 40, tokens_per_chunk: int = 1) -> Timing:
    arrivals = tuple(first + gap * tokens_per_chunk * i for i in range(tokens // tokens_per_chunk))
    return Timing(100, 0, tokens, 0.0, arrivals, decode)


def test_streams_are_counted_by_worker() -> None:
    found = steps_of([stream("a", 0.0, 0.02), stream("a", 0.01, 0.02), stream("b", 0.0, 0.03)])
    assert [(sample.batch, round(sample.seconds, 4)) for sample in found] == [(2, 0.02), (1, 0.03)]
    assert found[0].resident_tokens == 2 * 120


def test_chunks_of_two_tokens_count_twice() -> None:
    assert steps_of([stream("a", 0.0, 0.02, tokens_per_chunk=2)])[0].seconds == pytest.approx(0.02)


def test_streams_that_hardly_overlap_tell_nothing() -> None:
    assert steps_of([stream("a", 0.0, 0.02), stream("a", 0.75, 0.02)]) == []
