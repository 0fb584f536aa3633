"""bench.rescale: its rows, its slices, and the short form on made-up traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench.rescale import __main__ as rescale
from bench.rescale import run
from bench.rescale.cases import Case, tasks
from bench.rescale.play import play
from bench.rescale.rows import Rows, where_of
from bench.rescale.summary import summary, table


def test_the_short_form_runs_in_slices_and_ours_is_no_worse_than_standing_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    base = ["--short", "--interpreted", "--rows", str(rows)]
    rescale.main([*base, "--where", "policy=fixed:4:4,forebay", "--where", "convertible=off"])
    out, said = capsys.readouterr()
    result = json.loads(out)
    assert "left out: the traces azure-code" in said
    assert {(r["gear"], r["policy"]) for r in result["rows"]} == {
        (gear, policy) for gear in ("role", "replica-30") for policy in ("forebay", "fixed:4:4")
    }
    found = {(line["gear"]): line for line in result["summary"]}
    role = found["role"]
    assert role["attainment"]["forebay"] >= role["start_split_attainment"] - 0.5
    assert found["replica-30"]["attainment"]["forebay"] >= found["replica-30"]["start_split_attainment"] - 1
    # Going on from the file runs nothing again.
    monkeypatch.setattr(run, "play", None)
    size = len(rows.read_text().splitlines())
    monkeypatch.setattr(
        run, "short_cases", lambda: iter([Case("mix", "heavy", "role", False, "forebay", 0, scale=0.15)])
    )
    rescale.main([*base, "--where", "policy=forebay", "--where", "gear=role", "--table"])
    assert len(rows.read_text().splitlines()) == size
    assert "| mix | role | off |" in capsys.readouterr().out


def test_fixed_splits_are_shared_by_gears_and_the_oracle() -> None:
    case = Case("mix", "light", "role", False, "fixed:4:4", 0, scale=0.02)
    slow = replace(case, gear="replica-120")
    assert tasks([case, slow, replace(case, policy="oracle"), replace(case, policy="forebay")]) == [
        [case, slow, replace(case, policy="oracle")],
        [replace(case, policy="forebay")],
    ]
    one, two = play([case, slow])
    assert {**one, "gear": "", "cpu_s": 0} == {**two, "gear": "", "cpu_s": 0}
    assert (one["gear"], two["gear"]) == ("role", "replica-120")


def test_rows_are_found_again(tmp_path: Path) -> None:
    case = Case("mix", "heavy", "role", True, "demand", 1)
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add({**case.columns, "scale": 1.0, "attainment": 99.0})
    rows.add({"rate_of": "mooncake", "rate": 2.5})
    again = Rows(tmp_path / "rows.jsonl")
    assert again.has(case)
    assert not again.has(replace(case, seed=2))
    assert not again.has(replace(case, scale=0.15))
    assert again.rates == {"mooncake": 2.5}


def test_the_summary_names_the_best() -> None:
    rows: list[dict[str, object]] = [
        {**Case("mix", "heavy", "role", False, policy, seed).columns, "attainment": attainment, "moves": moves}
        for policy, seed, attainment, moves in (
            ("forebay", 0, 98.0, 4),
            ("forebay", 1, 96.0, 6),
            ("demand", 0, 95.0, 50),
            ("hpa", 0, 96.0, 2),
            ("fixed:4:4", 0, 90.0, 0),
            ("fixed:3:5", 0, 94.0, 0),
        )
    ]
    (line,) = summary(rows)
    assert line["attainment"] == {"forebay": 97.0, "demand": 95.0, "hpa": 96.0}
    assert line["moves"] == {"forebay": 5, "demand": 50, "hpa": 2}
    assert (line["best_fixed"], line["start_split_attainment"], line["best_other"]) == ("fixed:3:5", 90.0, "hpa")
    assert table([line]).splitlines()[2] == (
        "| mix | role | off | 97.0 (5) | 95.0 (50) | 96.0 (2) | - | - | - | - | 94.0 3:5 | 90.0 | - |"
    )


def test_a_column_that_is_none_is_said() -> None:
    with pytest.raises(SystemExit, match="'speed' is no column; use one of mix, level"):
        where_of(["speed=1"])
