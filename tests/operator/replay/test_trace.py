"""Trace files: what is read, and what each bad file is told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forebay_operator.replay.chain import Segment, chain, native_rate, superpose
from forebay_operator.replay.trace import Arrival, TraceError, read

CSV = "arrived_at,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("format_name", "text"),
    [
        ("csv", CSV + "10,5,7\n12.5,6,8\n"),
        ("servegen", "arrived_at,input_tokens,output_tokens,reason_ratio\n10,5,7,0.1\n12.5,6,8,0\n"),
        ("azure", AZURE + "2023-11-16 18:17:03.9799600,5,7\n2023-11-16 18:17:06.4799600,6,8\n"),
    ],
)
def test_formats(tmp_path: Path, format_name: str, text: str) -> None:
    trace = read(write(tmp_path, text), format_name)
    assert [(round(a.at, 6), a.prompt_tokens, a.output_tokens) for a in trace] == [(0.0, 5, 7), (2.5, 6, 8)]


def test_mooncake_spreads_each_tick_and_keeps_order(tmp_path: Path) -> None:
    rows = [f'{{"timestamp": {t}, "input_length": {n}, "output_length": 2}}' for t, n in ((0, 1), (0, 2), (3000, 3))]
    path = write(tmp_path, "\n".join(rows) + "\n")
    trace = read(path, "mooncake", seed=1)
    assert trace == read(path, "mooncake", seed=1)
    assert trace == sorted(trace)
    assert trace[0].at == 0.0
    assert trace[0].at != trace[1].at
    assert {a.prompt_tokens for a in trace} == {1, 2, 3}


@pytest.mark.parametrize(
    ("format_name", "text", "said"),
    [
        ("csv", "", "holds no request"),
        ("csv", CSV, "holds no request"),
        ("csv", "a,b\n1,2\n", "column arrived_at is missing"),
        ("csv", CSV + "1,5,7\n0.5,5,7\n", "line 3: its time is 0.5 s before"),
        ("csv", CSV + "1,-5,7\n", "line 2: prompt_tokens is '-5'"),
        ("csv", CSV + "1,5\n", "line 2: output_tokens is missing"),
        ("csv", CSV + "-1,5,7\n", "line 2: arrived_at is '-1'"),
        ("csv", CSV + "nan,5,7\n", "line 2: arrived_at is 'nan'"),
        ("csv", CSV + "1,0,7\n", "from 1 to"),
        ("azure", AZURE + "yesterday,5,7\n", "TIMESTAMP is 'yesterday'"),
        ("mooncake", "{]\n", "line 1: is no JSON"),
        ("mooncake", "[1]\n", "must be a JSON object"),
        ("mooncake", '{"timestamp": 0, "input_length": 3}\n', "field output_length is missing"),
        ("parquet", CSV, "use one of azure, mooncake, servegen, csv"),
    ],
)
def test_bad_traces_are_told_what_and_where(tmp_path: Path, format_name: str, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=r".*") as caught:
        read(write(tmp_path, text), format_name)
    assert said in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_a_columns_name(tmp_path: Path) -> None:
    """Spreadsheets write one before the header of a CSV."""
    assert len(read(write(tmp_path, "\ufeff" + CSV + "1,5,7\n"), "csv")) == 1


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(tmp_path / "none", "csv")
    (tmp_path / "gz").write_bytes(b"\x1f\x8b\x08\xff\xfe")
    with pytest.raises(TraceError, match="is it compressed"):
        read(tmp_path / "gz", "csv")


TEN = [Arrival(float(i), 100 + i, 10) for i in range(10)]


@pytest.mark.parametrize("rate", [0.3, 1.0, 4.7])
def test_superposition_gives_the_rate_and_only_the_traces_lengths(rate: float) -> None:
    scaled = superpose(TEN, rate, 2000.0, seed=3)
    assert len(scaled) / 2000.0 == pytest.approx(rate * 1.0, rel=0.12)
    assert scaled == sorted(scaled)
    assert {a.prompt_tokens for a in scaled} == {a.prompt_tokens for a in TEN}


def test_without_a_rate_the_trace_is_itself() -> None:
    assert chain([Segment(TEN)]) == TEN
    assert native_rate([Arrival(0.0, 1, 1)]) == 1.0
    assert chain([Segment([Arrival(0.0, 1, 1)])]) == [Arrival(0.0, 1, 1)]


def test_a_segment_ends_where_the_next_begins() -> None:
    other = [Arrival(0.0, 7, 7)]
    trace = chain([Segment(TEN), Segment(other, at=4.5)])
    assert [a.at for a in trace] == [0.0, 1.0, 2.0, 3.0, 4.0, 4.5]
    assert trace[-1].prompt_tokens == 7


@pytest.mark.parametrize(
    ("segment", "said"),
    [
        (Segment(TEN, at=-1.0), "starts at -1 s"),
        (Segment(TEN, at=math.nan), "starts at nan s"),
        (Segment([Arrival(0.0, 1, 1), Arrival(1e9, 1, 1)]), "write times in seconds"),
        (Segment(TEN, seconds=1e12), "write times in seconds"),
        (Segment(TEN, rate=1.0, seconds=math.inf), "write times in seconds"),
        (Segment(TEN, rate=0.0), "must be greater than 0"),
        (Segment(TEN, rate=1e9, seconds=10.0), "at most"),
        (Segment(TEN, rate=1e-9, seconds=1e-3), "leave no request"),
    ],
)
def test_impossible_chains(segment: Segment, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        chain([segment])
