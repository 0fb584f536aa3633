"""`forebay replay`: its options, its errors, its answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay_operator.cli import app
from support.replay import poisson

RUN = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{a.at:.3f},{a.prompt_tokens},{a.output_tokens}" for a in poisson(5.0, 90.0, 800, 40)]
    path.write_text("arrived_at,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def replay(*arguments: str) -> tuple[int, str, str]:
    result = RUN.invoke(app, ["replay", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def test_json_has_every_figure_for_every_policy(trace: Path) -> None:
    policies = ["forebay", "demand", "fixed:1:3", "hpa", "dynamo-load", "dynamo-throughput", "llmd-token"]
    policies += ["kthena-ratio", "oracle"]
    arguments = [x for p in policies for x in ("--policy", p)]
    code, out, _ = replay("--trace", str(trace), "--format", "csv", "--workers", "4", "--json", *arguments)
    assert code == 0
    rows = json.loads(out)
    assert [row["policy"] for row in rows] == policies
    for row in rows:
        assert row["requests"] > 400
        assert 0 <= row["attainment_percent"] <= min(row["ttft_percent"], row["tpot_percent"]) <= 100
        assert set(row["ttft_ms"]) == set(row["tpot_ms"]) == set(row["itl_ms"]) == {"p50", "p95", "p99"}
        assert sum(row["splits"].values()) == pytest.approx(90, abs=6)
    assert rows[2]["start"] == "1:3"
    assert rows[2]["moves"] == 0
    assert rows[-1]["attainment_percent"] >= rows[2]["attainment_percent"]


def test_the_same_seed_gives_the_same_answer(trace: Path) -> None:
    arguments = ("--trace", str(trace), "--format", "csv", "--rate", "10", "--workers", "4", "--json")
    first, second = replay(*arguments, "--seed", "3"), replay(*arguments, "--seed", "3")
    assert first == second
    assert first != replay(*arguments, "--seed", "4")


def test_the_table_names_the_setting_and_chains_traces(trace: Path) -> None:
    twice = ("--trace", str(trace), "--trace", str(trace), "--format", "csv", "--at", "0", "--at", "40")
    code, out, _ = replay(*twice, "--until", "70", "--gear", "replica-30", "--convertible", "on", "--path", "exact")
    assert code == 0
    for text in ("both objectives %", "gear replica-30", "convertible on", "h100-llama-8b", "time at prefill:decode"):
        assert text in " ".join(out.split())  # the title is folded to the table's width
    assert "Fast path" not in out


def test_no_figure_is_cut_off_on_a_narrow_screen(trace: Path) -> None:
    """Nine laws beside each other in 80 columns were `fore…` and `89.…`."""
    policies = ["forebay", "fixed:1:3", "fixed:2:2", "demand", "hpa", "dynamo-throughput", "llmd-token", "kthena-ratio"]
    arguments = [x for p in policies for x in ("--policy", p)]
    result = RUN.invoke(app, ["replay", "--trace", str(trace), "--workers", "4", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert all(result.stdout.count(f" {policy} ") == 1 for policy in policies)
    assert max(map(len, result.stdout.splitlines())) <= 80
    alone = RUN.invoke(app, ["replay", "--trace", str(trace), "--workers", "4", *arguments], env={"COLUMNS": "240"})
    assert alone.stdout.count("both objectives %") == 1


def test_the_start_up_of_a_replica_is_a_gear_of_its_own(trace: Path) -> None:
    asked = ("--trace", str(trace), "--workers", "4", "--json", "--policy", "demand")
    named, given = replay(*asked, "--gear", "replica-30"), replay(*asked, "--replica-start-s", "30")
    assert named == given
    assert json.loads(named[1])[0]["gear"] == "replica-30"
    assert json.loads(replay(*asked, "--role-switch-s", "3")[1])[0]["gear"] == "role"


def test_a_plot_is_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'forebay[plot]'")
    target = tmp_path / "out.png"
    code, _, _ = replay("--trace", str(trace), "--format", "csv", "--plot", str(target))
    assert code == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_told(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = replay("--trace", str(trace), "--format", "csv", "--plot", str(tmp_path / "out.png"))
    assert code == 2
    assert "pip install 'forebay[plot]'" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--start", "5:5"], "makes 10 workers and there are 8"),
        (["--start", "0:8"], "is no split"),
        (["--policy", "best"], "use one of forebay, demand, hpa"),
        (["--policy", "fixed:9:9"], "makes 18 workers"),
        (["--gear", "hot"], "is no gear"),
        (["--perf", "h300"], "is not known"),
        (["--convertible", "maybe"], "use on or off"),
        (["--ttft-ms", "0"], "must be greater than 0 ms"),
        (["--ttft-ms", "nan"], "must be greater than 0 ms, and finite"),
        (["--tpot-ms", "inf"], "must be greater than 0 ms, and finite"),
        (["--replica-start-s", "inf"], "the gear takes inf s"),
        (["--gear", "replica-30", "--role-switch-s", "2"], "ask for different gears; give one"),
        (["--gear", "replica-30", "--replica-start-s", "60"], "ask for different gears; give one"),
        (["--role-switch-s", "1", "--replica-start-s", "60"], "ask for different gears; give one"),
        (["--at", "nan"], "starts at nan s"),
        (["--lost-writes", "2"], "share from 0 to 1"),
        (["--stale", "9:3"], "ends before it begins"),
        (["--stale", "x"], "is no span"),
        (["--path", "quick"], "use fast or exact"),
        (["--rate", "-1"], "must be greater than 0"),
        (["--rate", "0"], "--rate is 0; it must be greater than 0"),
        (["--rate", "nan"], "must be greater than 0"),
        (["--at", "0", "--at", "1"], "given 2 times for 1 traces"),
        (["--until", "0"], "is not after"),
        (["--until", "nan"], "is not after"),
        (["--drain", "-1"], "--drain is -1; write seconds from 0"),
        (["--drain", "nan"], "--drain is nan"),
        (["--drain", "60"], "--drain 60 has no effect where workers change roles"),
        (["--role-switch-s", "5", "--drain", "60"], "or ask for --gear replica-N or --replica-start-s (and no --role"),
    ],
)
def test_bad_options_exit_2_with_the_remedy(trace: Path, arguments: list[str], said: str) -> None:
    code, _, error = replay("--trace", str(trace), "--format", "csv", *arguments)
    assert code == 2
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_one_start_for_several_traces_is_refused(trace: Path) -> None:
    """It was ignored: all of them started at 0."""
    code, _, error = replay("--trace", str(trace), "--trace", str(trace), "--at", "40", "--until", "70")
    assert code == 2
    assert "--at was given once for 2 traces; give it once for each" in " ".join(error.split())
    code, out, _ = replay("--trace", str(trace), "--at", "40", "--json", "--workers", "4", "--policy", "fixed:1:3")
    assert code == 0
    assert sum(json.loads(out)[0]["splits"].values()) == pytest.approx(130, abs=6)


def test_a_drain_that_is_cut_short_hands_requests_on(trace: Path) -> None:
    long = trace.parent / "long.csv"
    rows = [f"{a.at:.3f},{a.prompt_tokens},{a.output_tokens}" for a in poisson(20.0, 25.0, 200, 900)]
    long.write_text("arrived_at,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    chained = ("--trace", str(long), "--at", "0", "--rate", "20", "--trace", str(trace), "--at", "25", "--rate", "90")
    asked = (*chained, "--until", "55", "--workers", "6", "--start", "2:4", "--gear", "replica-3", "--json")
    found = {}
    for seconds in ("0", "600", None):
        drain = () if seconds is None else ("--drain", seconds)
        code, out, _ = replay(*asked, "--policy", "demand", *drain)
        assert code == 0
        found[seconds] = json.loads(out)[0]
    assert found["0"]["handed_on"] > 0
    assert found["0"]["unfinished"] == 0
    assert found[None] == found["600"]
    assert found[None]["handed_on"] == 0


def test_the_format_of_a_csv_need_not_be_given(trace: Path, tmp_path: Path) -> None:
    code, out, _ = replay("--trace", str(trace), "--workers", "4", "--json")
    assert code == 0
    assert out == replay("--trace", str(trace), "--format", "csv", "--workers", "4", "--json")[1]
    code, _, error = replay("--trace", str(tmp_path / "trace.jsonl"))
    assert code == 2
    assert "write azure, mooncake, servegen or csv" in " ".join(error.split())


def test_one_request_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("arrived_at,prompt_tokens,output_tokens\n5,10,1\n")
    code, out, _ = replay("--trace", str(path), "--format", "csv", "--json")
    assert code == 0
    assert json.loads(out)[0]["attainment_percent"] == 100.0
