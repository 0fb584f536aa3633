"""Performance models: the formulas against published figures, the fit, and loading."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_engine import perf
from forebay_engine.perf import PerfModel, load, names
from forebay_engine.perf.fit import Sample, describe, errors, fit, read_splitwise
from support.capacity import decode_capacity

REAL = [name for name in names() if name not in ("slow", "instant")]


@pytest.mark.parametrize(
    ("name", "new", "before", "milliseconds"),
    [
        # FLOPs by hand: (2 * 8.03e9 * n + 4 * 32 * 4096 * (n * p + n^2 / 2)) / (989e12 * 0.5)
        ("h100-llama-8b", 1024, 0, 33.8),
        ("h100-llama-8b", 8192, 0, 301.6),
        ("h100-llama-8b", 32768, 0, 1633.4),
        ("h100-llama-8b", 1024, 7168, 41.59),
        ("h100-llama-8b", 1, 0, 6.39),  # below the ridge the weights' read time counts
        ("h100-qwen-7b", 8192, 0, 279.7),
    ],
)
def test_formula_prefill(name: str, new: int, before: int, milliseconds: float) -> None:
    assert load(name).prefill_seconds(new, before) * 1e3 == pytest.approx(milliseconds, rel=0.005)


@pytest.mark.parametrize(
    ("name", "batch", "context", "milliseconds"),
    [
        # (2 * 8.03e9 + batch * context * 131072) / (3.35e12 * 0.75)
        ("h100-llama-8b", 1, 1024, 6.45),
        ("h100-llama-8b", 32, 2048, 9.81),
        ("h100-llama-8b", 128, 2048, 20.07),
        ("h100-llama-8b", 64, 8192, 33.74),
        ("h100-qwen-32b", 128, 2048, 26.6),
    ],
)
def test_formula_decode(name: str, batch: int, context: int, milliseconds: float) -> None:
    assert load(name).decode_seconds(batch, batch * context) * 1e3 == pytest.approx(milliseconds, rel=0.005)


@pytest.mark.parametrize(
    ("name", "sample", "milliseconds"),
    [
        # Medians of splitwise-sim's perf_model.csv, llama2-70b, tensor_parallel 4.
        ("h100-llama-70b", Sample(0, chunks=((128, 0),)), 49.1),
        ("h100-llama-70b", Sample(0, chunks=((512, 0),)), 59.7),
        ("h100-llama-70b", Sample(0, chunks=((2048, 0),)), 200.7),
        ("h100-llama-70b", Sample(0, chunks=((8192, 0),)), 953.6),
        ("h100-llama-70b", Sample(0, chunks=((512, 0),) * 64), 3520.5),
        ("h100-llama-70b", Sample(0, batch=1, resident_tokens=576), 29.7),
        ("h100-llama-70b", Sample(0, batch=64, resident_tokens=36_864), 52.4),
        ("a100-llama-70b", Sample(0, chunks=((128, 0),)), 63.7),
        ("a100-llama-70b", Sample(0, chunks=((2048, 0),)), 403.3),
        ("a100-llama-70b", Sample(0, chunks=((512, 0),) * 64), 10947.8),
        ("a100-llama-70b", Sample(0, batch=1, resident_tokens=8256), 46.1),
        ("a100-llama-70b", Sample(0, batch=64, resident_tokens=36_864), 72.9),
    ],
)
def test_fitted_models_are_near_the_measurements(name: str, sample: Sample, milliseconds: float) -> None:
    assert sample.predicted(load(name)) * 1e3 == pytest.approx(milliseconds, rel=0.2)


@pytest.mark.parametrize("name", REAL)
@given(
    chunk=st.tuples(st.integers(1, 4000), st.integers(0, 30_000)),
    batch=st.integers(0, 200),
    context=st.integers(1, 3000),
)
def test_more_work_never_takes_less_time(name: str, chunk: tuple[int, int], batch: int, context: int) -> None:
    model = load(name)
    new, before = chunk
    mixed = model.step_seconds([chunk], batch, batch * context)
    assert mixed >= model.decode_seconds(batch, batch * context)
    assert mixed >= model.prefill_seconds(new, before) > 0
    assert model.prefill_seconds(new + 1, before) >= model.prefill_seconds(new, before)
    assert model.prefill_seconds(new, before + 1) >= model.prefill_seconds(new, before)
    assert model.decode_seconds(batch + 1, (batch + 1) * context) >= model.decode_seconds(batch, batch * context)


@pytest.mark.parametrize("name", names())
def test_every_named_model_is_whole(name: str) -> None:
    model = load(name)
    assert model.name == name
    assert model.source in ("formula", "fitted", "made-up")
    assert model.note
    assert model.kv_capacity_tokens >= 16_384
    capacity = decode_capacity(model, 1024)
    assert capacity >= 1
    assert model.decode_seconds(capacity, capacity * 1024) <= model.tpot_objective_seconds
    more = capacity + 1
    assert (
        model.decode_seconds(more, more * 1024) > model.tpot_objective_seconds or more * 1024 > model.kv_capacity_tokens
    )


def test_sources_are_told_apart() -> None:
    assert load("h100-llama-8b").source == "formula"
    for name in ("h100-llama-70b", "a100-llama-70b"):
        assert load(name).source == "fitted"
        assert "MIT" in load(name).note
    licence = Path(perf.__file__).with_name("models") / "LICENSE.splitwise-sim"
    assert "Copyright (c) 2024 Pratyush Patel" in licence.read_text()


def test_a_hand_off_takes_bytes_over_bandwidth() -> None:
    model = load("h100-llama-8b")
    assert model.kv_bytes_per_token == 131_072
    assert model.handoff_seconds(8192) == pytest.approx(0.0005 + 8192 * 131_072 / 46e9)
    assert load("instant").handoff_seconds(8192) == 0.0


def test_slow_and_instant_are_what_tests_need() -> None:
    slow, instant = load("slow"), load("instant")
    assert 0.01 < slow.decode_seconds(8, 8 * 500) < 0.1
    assert instant.step_seconds([(5000, 0)], 100, 100_000) == 0.0
    assert slow.step_seconds([], 0, 0) == 0.0


def written(**changes: float) -> str:
    """The text of a file that is right but for these fields."""
    return msgspec.json.encode(msgspec.structs.replace(load("slow"), **changes)).decode()


class TestLoad:
    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'h100-lama-8b' is not known; use one of .*h100-llama-8b"):
            load("h100-lama-8b")

    def test_a_calibrated_file_round_trips(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_bytes(msgspec.json.encode(load("a100-llama-70b")))
        assert load(str(path)) == load("a100-llama-70b")

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("{}", "missing required field"),
            ('{"nam": 1}', "nam"),
            ("{", "truncated; it begins with '{'"),
            (None, "cannot be read"),
            (written(layers=0), "layers is 0; must be at least 1"),
            (written(token_seconds=-0.5), "token_seconds is -0.5; must be at least 0"),
            (written(token_seconds=1e308), r"token_seconds is 1e\+308; must be at most 10000"),
            (written(kv_capacity_tokens=10**30), r"kv_capacity_tokens is 1e\+30; must be at most 1e\+15"),
            (written(tpot_objective_seconds=0.0), "tpot_objective_seconds is 0; must be over 0"),
            (written(role_switch_seconds=-1.0), "role_switch_seconds is -1; must be at least 0"),
        ],
    )
    def test_a_bad_file_is_named_with_the_fault(self, tmp_path: Path, text: str | None, complaint: str) -> None:
        path = tmp_path / "mine.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=f"mine.json: .*{complaint}"):
            load(str(path))


class TestFit:
    def test_finds_the_coefficients_that_made_the_samples(self) -> None:
        true = load("h100-llama-70b")
        samples = [Sample(true.prefill_seconds(n), chunks=((n, 0),)) for n in (128, 512, 1024, 2048, 4096, 8192)]
        start = msgspec.structs.replace(true, token_seconds=2e-4, prefill_overhead_seconds=0.1)
        found = fit(start, samples, ("token_seconds", "prefill_overhead_seconds"))
        assert max(abs(e) for e in errors(found, samples)) < 0.02
        assert max(abs(e) for e in errors(start, samples)) > 0.5

    def test_reads_medians_of_the_table_and_names_what_is_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text(
            "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
            "m,gpu,512,2,128,100,30,4\nm,gpu,512,2,128,120,34,4\nm,gpu,512,2,128,900,32,4\nm,gpu,512,2,128,5,5,8\n"
        )
        prefill, decode = read_splitwise(path, "m", "gpu", 4)
        assert (prefill.seconds, prefill.chunks) == (0.12, ((512, 0), (512, 0)))
        assert (decode.seconds, decode.batch, decode.resident_tokens) == (0.032, 2, 2 * (512 + 64))
        assert "prefill: error" in describe(load("h100-llama-70b"), [prefill, decode])
        with pytest.raises(ValueError, match="no row for model m, hardware gpu, tensor_parallel 2"):
            read_splitwise(path, "m", "gpu", 2)


def test_model_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load("slow").tp = 2  # type: ignore[misc]
    assert isinstance(load("slow"), PerfModel)
