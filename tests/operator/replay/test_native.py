"""Compiled inner loops: they are found, they say what they say interpreted, and edits are never shadowed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from bench import native

from forebay_operator.replay.fast import FastWorker

ROWS = """
    import json, pathlib, sys
    from bench import native

    native.use(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    from bench.rescale.cases import Case
    from bench.rescale.play import play
    import forebay_operator.replay.fast

    rows = []
    for gear, on, policy in (
        ("role", True, "forebay"),
        ("replica-30", False, "demand"),
        ("role", False, "fixed:1:7"),
        ("role", False, "oracle"),
    ):
        (row,) = play([Case("mix", "heavy", gear, on, policy, 0, scale=0.03)])
        rows.append({name: value for name, value in row.items() if name not in ("cpu_s", "decide_ms")})
    print(json.dumps([forebay_operator.replay.fast.__file__, rows]))
"""


def rows_of(*words: str) -> tuple[str, list[dict[str, object]]]:
    command = [sys.executable, "-c", textwrap.dedent(ROWS), *words]
    done = subprocess.run(command, cwd=native.ROOT, capture_output=True, text=True, check=True, timeout=300)
    file, rows = json.loads(done.stdout)
    return file, rows


@pytest.mark.timeout(600)
def test_compiled_loops_give_the_same_rows() -> None:
    try:
        folder = native.built()
    except native.NotBuilt as missing:
        pytest.skip(f"the replay's loops cannot be compiled here: {missing}")
    compiled, fast = rows_of(str(folder))
    interpreted, slow = rows_of()
    assert Path(compiled).is_relative_to(folder)
    assert Path(interpreted).suffix == ".py"
    assert fast == slow
    assert len({row["attainment"] for row in fast}) > 1


def test_what_was_imported_before_is_told() -> None:
    assert FastWorker.__module__ in native.MODULES
    with pytest.raises(RuntimeError, match=r"forebay_operator\.replay\.fast.* were imported before"):
        native.use(Path("anywhere"))


def test_an_edited_source_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in native.SOURCES:
        (tmp_path / folder).mkdir(parents=True)
    file = tmp_path / "operator" / "one.py"
    file.write_text("a = 1\n")
    monkeypatch.setattr(native, "ROOT", tmp_path)
    before = native._digest()
    file.write_text("a = 2\n")
    assert native._digest() != before


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NotBuilt, match=r"no C compiler: .* is not on PATH"):
        native.built(tmp_path / "cache")
